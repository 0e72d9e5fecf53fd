"""Where a directory's chat template stands, and in which form it takes what messages say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.checkpoint_limits import read_json
from baton.tokenizer.conversation import Conversation
from baton.tokenizer.render_limits import RenderLimits

_PROBE = "probe"


def read_templates(path: Path, tokenizer: Any) -> None:
    """Gives `tokenizer` the template of chat_template.json, where models that take images had it, if it has
    none. Raises CheckpointError for a damaged file."""
    file = path / "chat_template.json"
    if tokenizer.chat_template or not file.is_file():
        return
    found = read_json(file).get("chat_template")
    if isinstance(found, list):  # several
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
    tokenizer.chat_template = found or None


def takes_parts(tokenizer: Any, limits: RenderLimits) -> bool:
    """Whether the template shows content that is a list of parts and not one that is a text, as those of many
    models that take images do."""
    text = Conversation([{"role": "user", "content": _PROBE}])

    def shows(conversation: Conversation) -> bool:
        try:
            return _PROBE in tokenizer.apply_chat_template([*conversation.messages], tokenize=False)
        except Exception:  # anything that the template may raise: it is the checkpoint's code
            return False

    try:
        return limits.run(lambda: not shows(text) and shows(text.with_parts()))
    except Exception:  # it does not end: rendering it will say so
        return False
