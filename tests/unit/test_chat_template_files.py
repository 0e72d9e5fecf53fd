"""Chat templates where checkpoints have them: beside the tokenizer's configuration, and in which form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from baton.demo import model_path
from baton.tokenizer import hf_tokenizer
from baton.tokenizer.conversation import Conversation

PLAIN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
PARTS = (
    "{% for m in messages %}[{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] }}{% endfor %}]{% endfor %}"
)
"""As those of models that take images are; of a text it would show nothing."""


@pytest.fixture
def folder(tmp_path):
    """A checkpoint without a template."""
    path = Path(shutil.copytree(model_path(), tmp_path / "model"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    assert not hf_tokenizer.load(path).chat
    return path


def shown(path, tools=()):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "a page"}]
    return hf_tokenizer.load(path).render(Conversation(messages, tools, {}), False).text


@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_a_template_that_is_in_chat_template_json_alone(folder, template):
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert shown(folder) == "[be][a page]"
    (folder / "chat_template.jinja").write_text("the tokenizer's own")
    assert shown(folder) == "the tokenizer's own"


def test_several_templates_in_chat_template_json(folder):
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": named}))
    assert shown(folder) == "[be][a page]"
    assert "look" in shown(folder, [{"name": "look"}])


def test_further_templates_have_a_folder(folder):
    (folder / "chat_template.jinja").write_text(PLAIN)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}")
    assert shown(folder) == "[be][a page]"
    assert "look" in shown(folder, [{"name": "look"}])
