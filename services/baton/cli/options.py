"""Turns configuration dataclasses into command-line flags, environment variables and TOML keys.

A field `kv_tokens` becomes `--kv-tokens`, `BATON_KV_TOKENS` and the TOML key `kv_tokens`; its help is the
docstring below the field. Precedence: flag, environment, TOML file (`--config`), default.

A TOML file is for all processes of a deployment. A key at the top is for every process with such a field.
Tables `[gateway]`, `[tokenizer]`, `[prefill]` and `[decode]` are for that process alone and override the top.
A key that no process has is an error.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.cli.other_servers import NAMES, NOT_NEEDED
from baton.config import DecodeConfig, GatewayConfig, NodeConfig, PrefillConfig, TokenizerConfig

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One configuration value."""

    name: str
    kind: type
    """str, int, float, bool or tuple (of strings)."""
    optional: bool
    """None is allowed."""
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    """All values of a text, or of each in a tuple; empty: any."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "BATON_" + self.name.upper()


def fields_of(config: type) -> Mapping[str, Field]:
    """The fields of a configuration dataclass by name, inherited ones first."""
    hints = typing.get_type_hints(config)
    found = {}
    for field in dataclasses.fields(config):
        kind, optional = hints[field.name], False
        if isinstance(kind, types.UnionType):
            alternatives = [one for one in typing.get_args(kind) if one is not type(None)]
            assert len(alternatives) == 1, f"{config.__name__}.{field.name}: at most one type beside None"
            kind, optional = alternatives[0], True
        several = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
        choices = typing.get_args(several) if typing.get_origin(several) is typing.Literal else ()
        kind = str if choices and several is kind else typing.get_origin(kind) or kind
        assert kind in (str, int, float, bool, tuple), f"{config.__name__}.{field.name}: {kind}"
        text = _help_of(config, field.name)
        found[field.name] = Field(field.name, kind, optional, field.default, text, choices)
    return found


def _help_of(config: type, name: str) -> str:
    for base in config.__mro__:
        if dataclasses.is_dataclass(base) and name in (texts := _docstrings(base)):
            return texts[name]
    return ""


@cache
def _docstrings(config: type) -> Mapping[str, str]:
    """Field name -> the string literal on the line below it."""
    (definition,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, below in zip(definition.body, definition.body[1:], strict=False):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


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
    `given` and `build` can tell it from one that was given its default.
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


def given(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the configuration that were given as a flag, in the environment or in a file. Raises
    click.UsageError that names the flag or variable of a number out of range (none may be negative), or of a
    text that is not among its choices."""
    found: dict[str, Any] = {}
    for name, field in fields_of(config).items():
        value = values.get(name)
        if value is None or (field.kind is tuple and value == ()):
            continue
        if field.kind is tuple:
            value = _items(value)
        found[name] = None if value == "none" and field.optional else value
        if (wrong := _out_of_range(field, found[name])) is not None:
            ctx = click.get_current_context(silent=True)
            source = ctx.get_parameter_source(name) if ctx is not None else None
            there = source is click.core.ParameterSource.ENVIRONMENT
            raise click.UsageError(f"{field.variable if there else field.flag} {wrong}")
    return found


def _items(value: str | Collection[str]) -> tuple[str, ...]:
    """Of one or several texts, separated by commas."""
    texts = [value] if isinstance(value, str) else value
    return tuple(item.strip() for text in texts for item in text.split(",") if item.strip())


def _out_of_range(field: Field, value: Any) -> str | None:
    """What a number or a text must be, None: what it is."""
    if field.choices:
        unknown = set(_items(value) if field.kind is tuple else [value]).difference(field.choices)
        *others, last = field.choices
        return f"must be {', '.join(others)} or {last}, not {min(unknown)!r}" if unknown else None
    if field.kind not in (int, float) or value is None:
        return None
    part = field.name in PARTS
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a number, not {value}"
    if not 0 <= value <= (1 if part else math.inf):
        return f"must be {'from 0 to 1' if part else 'at least 0'}, not {value}"
    return None


def build(config: type[C], values: Mapping[str, Any], defaults: Mapping[str, Any]) -> C:
    """The configuration: given values, else `defaults`, else the dataclass's own."""
    return config(**{**defaults, **given(config, values)})


def as_flags(config: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Command-line arguments of these values for a child process."""
    for name, value in values.items():
        field = fields_of(config)[name]
        if field.kind is bool:
            yield field.flag if value else f"--no-{field.flag[2:]}"
        else:
            yield field.flag
            yield ",".join(value) if field.kind is tuple else "none" if value is None else str(value)


def fail(message: str, code: int = 1) -> typing.NoReturn:
    """Ends the command with one line on stderr."""
    click.echo(f"baton: {message}", err=True)
    sys.exit(code)


PARTS = frozenset({"otel_sample", "memory_fraction", "max_leased_fraction", "watermark"})
"""Fields that are a part of something: from 0 to 1."""
ROLES: Mapping[str, type[NodeConfig]] = {
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}


def read_config(path: Path, role: str) -> dict[str, Any]:
    """The file's values for one role, as click's `default_map` takes them.

    Raises click.UsageError that names the file and the key if a key is unknown, or its value has the wrong
    type or is out of range.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key in ROLES and isinstance(value, dict):
            continue
        # A table's name may also be a field (`prefill` of decode): a list at the top is that field.
        configs = [config for config in ROLES.values() if key in fields_of(config)]
        if not configs:
            raise click.UsageError(f"{path}: unknown key {key!r}")
        checked = [_check(path, key, fields_of(config)[key], value) for config in configs]
        if key in fields_of(ROLES[role]):
            values[key] = checked[0]
    for name, config in ROLES.items():
        table = content.get(name)
        if not isinstance(table, dict):
            continue
        for key, value in table.items():
            if key not in fields_of(config):
                raise click.UsageError(f"{path}: unknown key '{name}.{key}'")
            checked_value = _check(path, f"{name}.{key}", fields_of(config)[key], value)
            if name == role:
                values[key] = checked_value
    return values


def _check(path: Path, key: str, field: Field, value: Any) -> Any:
    accepted: tuple[type, ...] = {float: (int, float), tuple: (list, str)}.get(field.kind, (field.kind,))
    if field.optional and value == "none":
        return value
    wrong = not isinstance(value, accepted) or (isinstance(value, bool) and field.kind is not bool)
    if not wrong and isinstance(value, list):
        wrong = not all(isinstance(item, str) for item in value)
    if wrong:
        expected = {tuple: "a list of strings", int: "an integer", float: "a number", bool: "true or false"}
        raise click.UsageError(
            f"{path}: {key!r} must be {expected.get(field.kind, 'a string')}, not {value!r}"
        )
    if (beyond := _out_of_range(field, value)) is not None:
        raise click.UsageError(f"{path}: {key!r} {beyond}")
    return [value] if field.kind is tuple and isinstance(value, str) else value


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
