"""A click group whose commands live in modules of their own, imported only when one is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click

Commands = Mapping[str, Mapping[str, tuple[str, str]]]
"""Section -> command -> (module:attribute in baton.cli, short help)."""


class LazyGroup(click.Group):
    """`lazy`: its commands. Help lists them by section."""

    def __init__(self, *args: Any, lazy: Commands, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in self._lazy.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for section in self._lazy.values():
            if cmd_name in section:
                module, attribute = section[cmd_name][0].split(":")
                command = getattr(importlib.import_module(f"baton.cli.{module}"), attribute)
                assert isinstance(command, click.Command)
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in self._lazy.items():
            with formatter.section(title):
                formatter.write_dl([(name, short) for name, (_, short) in section.items()])
