"""Configuration dataclasses as named values: from flags, environment variables and TOML files, checked.

A field `kv_tokens` is the flag `--kv-tokens`, the variable `BATON_KV_TOKENS` and the TOML key `kv_tokens`;
its help is the docstring below the field.

A TOML file is for all processes of a deployment. A key at the top is for every process with such a field.
Tables `[gateway]`, `[tokenizer]`, `[prefill]`, `[decode]` and `[encode]` are for that process alone and
override the top.
A key that no process has is an error.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import tomllib
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.config import DecodeConfig, EncodeConfig, GatewayConfig, NodeConfig, PrefillConfig, TokenizerConfig

C = TypeVar("C")
PARTS = frozenset({"otel_sample", "memory_fraction", "max_leased_fraction", "watermark"})
"""Fields that are a part of something: from 0 to 1."""
NOT_0 = frozenset({"least_prefill", "least_decode"})
"""Fields that are at least 1."""
ROLES: Mapping[str, type[NodeConfig]] = {
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "encode": EncodeConfig,
}


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


def variables() -> set[str]:
    """Names of the environment variables that set fields of any process."""
    return {field.variable for config in ROLES.values() for field in fields_of(config).values()}


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


def explicit_fields(config: type, values: Mapping[str, Any]) -> dict[str, Any]:
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
    """The items of one or several texts, separated by commas."""
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
    part, least = field.name in PARTS, int(field.name in NOT_0)
    if isinstance(value, float) and not math.isfinite(value):
        return f"must be a number, not {value}"
    if not least <= value <= (1 if part else math.inf):
        return f"must be {'from 0 to 1' if part else f'at least {least}'}, not {value}"
    return None


def build(config: type[C], values: Mapping[str, Any], defaults: Mapping[str, Any]) -> C:
    """The configuration: given values, else `defaults`, else the dataclass's own."""
    return config(**{**defaults, **explicit_fields(config, values)})


def as_flags(config: type, values: Mapping[str, Any]) -> Iterator[str]:
    """Command-line arguments of these values for a child process."""
    for name, value in values.items():
        field = fields_of(config)[name]
        if field.kind is bool:
            yield field.flag if value else f"--no-{field.flag[2:]}"
        else:
            yield field.flag
            yield ",".join(value) if field.kind is tuple else "none" if value is None else str(value)


def read_config(path: Path, role: str) -> dict[str, Any]:
    """The file's values for one role, as click's `default_map` takes them.

    Raises click.UsageError that names the file and the key if a key is unknown, or its value has the wrong
    type or is out of range.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key in ROLES and isinstance(value, dict):
            continue
        if key in ROLES and isinstance(value, int):
            text = "is a list of addresses; the number of nodes is a flag of 'baton up'"
            raise click.UsageError(f"{path}: {key!r} {text}: --{key}")
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
