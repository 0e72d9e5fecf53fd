"""Chat templates that loop or grow without limit."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.demo import model_path
from baton.model_path import CheckpointError
from baton.tokenizer import hf_tokenizer, render_limits
from baton.tokenizer.conversation import Conversation
from baton.tokenizer.render_limits import RenderLimitExceeded, RenderLimits, takes_powers

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x OP ns.x %}{% endfor %}"


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setattr(render_limits, "RENDER_SECONDS", 0.5)
    monkeypatch.setattr(render_limits, "RENDER_BYTES", 2**26)


def load(folder, template):
    path = Path(shutil.copytree(model_path(), folder / "model"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (path / "chat_template.jinja").unlink(missing_ok=True)
    return hf_tokenizer.load(path)


def render(tokenizer, content="x"):
    return tokenizer.render(Conversation([{"role": "user", "content": content}], [], {}), True).text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LOOP, r"more than 0\.5 s"),
        (DOUBLES.replace("OP", "~"), "more than (64 MiB|0.5 s)"),
        (DOUBLES.replace("OP", "+"), "more than (64 MiB|0.5 s)"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_a_template_without_end_fails_in_one_line(limits, tmp_path, template, text):
    tokenizer = load(
        tmp_path, f"{{% if messages[0].content == 'y' %}}{template}{{% else %}}fine{{% endif %}}"
    )
    assert render(tokenizer) == "fine"
    began = time.monotonic()
    with pytest.raises(hf_tokenizer.TemplateFailed, match=text) as caught:
        render(tokenizer, "y")
    assert time.monotonic() - began < 10.0 and "\n" not in str(caught.value)
    assert render(tokenizer) == "fine"


def test_what_is_in_time_is_not_ended(limits, monkeypatch):
    """Also if it ends at the very moment: nothing is raised later in its thread."""
    limited, ends = RenderLimits(), {True: 0, False: 0}

    def work(seconds):
        clock = time.pthread_getcpuclockid(threading.get_ident())
        until = time.clock_gettime(clock) + seconds
        while time.clock_gettime(clock) < until:
            pass
        return seconds

    def one(seconds):
        try:
            return limited.run(lambda: work(seconds)) == seconds
        except RenderLimitExceeded:
            return False

    monkeypatch.setattr(render_limits, "RENDER_SECONDS", 0.05)
    with ThreadPoolExecutor(4) as threads:
        for fine in threads.map(one, [0.05 + 0.001 * (i % 30) for i in range(60)]):
            ends[fine] += 1
        assert list(threads.map(one, [0.0] * 50)) == [True] * 50
    assert all(ends.values()), ends
    assert not limited._running
    with pytest.raises(ValueError, match="its own"):
        limited.run(lambda: int("its own"))


@pytest.mark.parametrize(
    ("template", "powers"),
    [
        ("{{ 9**9**9 }}", True),
        ("{{ x ** 2 }}", True),
        ("{{ '**' }} ** {# 2 ** 3 #}", False),
        ("{{ f(**x) }}{{ f(1, **x) }}", False),
        ("{% if %", False),
    ],
)
def test_powers_are_found(template, powers):
    assert takes_powers(template) is powers


def test_powers_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot use the chat template .* powers"):
        load(tmp_path, "{{ 9**9**9 }}")
