"""Command-line options: those that configuration dataclasses turn into (see `fields`), and commands' own.

Precedence: flag, environment, TOML file (`--config`), default.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.cli.config_fields import Field, fields_of, read_config
from baton.cli.flag_aliases import NAMES, NOT_NEEDED
from baton.config import NodeConfig

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")


class NoneOrInt(click.ParamType):  # type: ignore[type-arg]
    name = "integer or 'none'"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "none":
            return "none"
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither an integer nor 'none'", param, ctx)


class _Items(click.ParamType):  # type: ignore[type-arg]
    """Values separated by commas; a flag may also be repeated."""

    name = "text[,text...]"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)


def _default_text(default: Any) -> str:
    match default:
        case None:
            return "none"
        case bool():
            return "yes" if default else "no"
        case tuple():
            return ",".join(default) or "empty"
        case _:
            return str(default) or "empty"


class SectionedOption(click.Option):
    """An option with the title of its section in `--help`."""

    section: str = ""

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Names the environment variable if the value came from there."""
        hint = super().get_error_hint(ctx)
        source = ctx.get_parameter_source(self.name or "") if ctx is not None else None
        return f"{hint} ({self.envvar})" if source is click.core.ParameterSource.ENVIRONMENT else hint


class SectionedCommand(click.Command):
    """A command whose `--help` groups its options, and whose errors know those of other servers."""

    allow_extra_args = True  # an error of its own names --model

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {flag for param in self.params for flag in param.opts}
        try:
            super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            theirs = error.option_name.replace("_", "-")
            ours = NAMES.get(theirs)
            if ours not in flags and theirs not in NOT_NEEDED:
                raise
            hint = f"here it is {ours}" if ours in flags else NOT_NEEDED[theirs]
            text = f"No such option {error.option_name!r}: {hint}."
            raise click.NoSuchOption(error.option_name, text, ctx=ctx) from None
        if ctx.args and not ctx.resilient_parsing:
            hint = f"; a model is named by --model {ctx.args[0]}" if "--model" in flags else ""
            ctx.fail(f"unexpected argument {ctx.args[0]!r}{hint}")
        return ctx.args

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", "") or "Options", []).append(record)
        for title in sorted(sections, key="Options".__ne__):
            with formatter.section(title):
                formatter.write_dl(sections[title])


def config_options(
    config: type, *, leave_out: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[[F], F]:
    """A decorator that adds one flag for each field of a configuration dataclass.

    `defaults` replaces the dataclass's defaults in the help. A flag that was not given is None or (), so that
    `explicit_fields` and `build` can tell it from one that was given its default.
    """

    def decorate(function: F) -> F:
        for field in reversed(list(fields_of(config).values())):
            if field.name not in leave_out:
                default = (defaults or {}).get(field.name, field.default)
                function = _option(field, default, _section(config, field.name))(function)
        return function

    return decorate


def _section(config: type, name: str) -> str:
    """The section of the dataclass that defines the field."""
    owner = [base for base in config.__mro__ if name in getattr(base, "__annotations__", {})][-1]
    base = owner.__name__.removesuffix("Config")
    return {"Node": "Process", "Worker": "Engine"}.get(base, base)


def _option(field: Field, default: Any, section: str) -> Callable[[F], F]:
    suffix = "" if default is None else f"  [default: {_default_text(default)}]"
    names: dict[Any, str] = {int: "N", float: "X", tuple: "TEXT[,TEXT...]"}
    settings: dict[str, Any] = {
        "cls": SectionedOption,
        "envvar": field.variable,
        "default": None,
        "help": field.help + suffix,
    }
    if field.kind is bool:
        flags = f"{field.flag}/--no-{field.flag[2:]}"
    else:
        flags = field.flag
        settings["metavar"] = names.get(field.kind, "TEXT")
        settings["type"] = field.kind
    if field.kind is tuple:
        settings |= {"type": _Items(), "multiple": True}
    elif field.kind is int and field.optional:
        settings |= {"type": NoneOrInt(), "metavar": "N|none"}

    def decorate(function: F) -> F:
        function = click.option(flags, **settings)(function)
        function.__click_params__[-1].section = section  # type: ignore[attr-defined]
        return function

    return decorate


def fail(message: str, code: int = 1) -> typing.NoReturn:
    """Ends the command with one line on stderr."""
    click.echo(f"baton: {message}", err=True)
    sys.exit(code)


def config_file_option(role: str, only: Collection[str] | None = None) -> Callable[[F], F]:
    """A decorator that adds `--config FILE`, which sets a role's values, or only those in `only`."""

    def load(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is not None:
            values = read_config(value, role)
            ctx.default_map = {key: item for key, item in values.items() if only is None or key in only}
        return value

    return click.option(
        "--config",
        "config_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="BATON_CONFIG",
        show_envvar=True,
        is_eager=True,
        callback=load,
        help="TOML file with the same names (underscores for dashes); flags and environment override it.",
    )


HOSTS = ("nnodes", "node_rank", "master")
"""Fields of a worker on several hosts."""
PROCESS = frozenset({*fields_of(NodeConfig), *HOSTS})
"""What commands leave out that start workers by themselves: of their processes and hosts."""
COUNT = click.IntRange(1)
SIZE = click.IntRange(0)
SECONDS = click.FloatRange(0, min_open=True)
FRACTION = click.FloatRange(0)
FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A text parsed by a function, whose ValueError says what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def option(
    names: str, kind: Any, default: Any, text: str, metavar: str | None = None, **more: Any
) -> Callable[[F], F]:
    """An option whose help shows its default. names: "--flag", or "--flag argument"."""
    kinds: dict[type, str] = {click.IntRange: "N", click.FloatRange: "X", click.Path: "FILE"}
    shown = not callable(default) and default not in (None, "", ())
    return click.option(
        *names.split(),
        type=kind,
        default=default,
        show_default=shown,
        metavar=metavar or kinds.get(type(kind)),
        help=text,
        **more,
    )


def options(*several: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that adds several options."""

    def decorate(function: F) -> F:
        for add in reversed(several):
            function = add(function)
        return function

    return decorate


def take(kind: type[C], values: dict[str, Any], **more: Any) -> C:
    """A dataclass of the options named like its fields, which are removed from `values`."""
    names = {field.name for field in dataclasses.fields(kind)} & values.keys()  # type: ignore[arg-type]
    return kind(**{name: values.pop(name) for name in names}, **more)
