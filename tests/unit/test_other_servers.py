"""Options of other servers: docs/operations.md has those that commands know, by the same names."""

import re
from pathlib import Path

from baton.cli.flag_aliases import NAMES, NOT_NEEDED
from baton.cli.serve import serve
from baton.cli.up import up

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def flags(command):
    return {flag for param in command.params for flag in param.opts}


def test_the_table_of_options_says_what_commands_do():
    text = DOCUMENT.read_text(encoding="utf-8")
    table = text.partition("### From vLLM or SGLang")[2].partition("Requests")[0]
    rows = [re.findall(r"--[a-z-]+", row) for row in table.splitlines() if row.startswith("| ")]
    for theirs, ours in NAMES.items():
        assert any(theirs in row and ours in row for row in rows), f"{theirs} is {ours}"


def test_options_that_are_named_exist():
    known = flags(up) | {flag for name in serve.commands for flag in flags(serve.commands[name])}
    assert known >= set(NAMES.values())
    assert known.isdisjoint(NAMES.keys() | NOT_NEEDED.keys())
