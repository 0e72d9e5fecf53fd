"""`--config FILE`: a TOML file for all processes of a deployment.

Keys at the top go to every process that has such a field; tables `[gateway]`, `[tokenizer]`, `[prefill]` and
`[decode]` go to that process alone and win over the top. A key that no process knows is an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from baton.cli.options import Field, fields_of
from baton.config import DecodeConfig, GatewayConfig, NodeConfig, PrefillConfig, TokenizerConfig

ROLES: Mapping[str, type[NodeConfig]] = {
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}

F = TypeVar("F", bound=Callable[..., Any])


def read_config(path: Path, role: str) -> dict[str, Any]:
    """The file's values for one role, in the form that click's `default_map` takes.

    Raises click.UsageError that names the file and the key for what is unknown or has the wrong type.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"cannot read {path}: {error}") from error
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key in ROLES and isinstance(value, dict):
            continue
        # A table's name is also a field of some roles (`prefill` of decode): a list at the top is that field.
        takers = [config for config in ROLES.values() if key in fields_of(config)]
        if not takers:
            raise click.UsageError(f"{path}: unknown key {key!r}")
        checked = [_check(path, key, fields_of(config)[key], value) for config in takers]
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
    return [value] if field.kind is tuple and isinstance(value, str) else value


def config_file_option(role: str, only: Collection[str] | None = None) -> Callable[[F], F]:
    """A decorator that adds `--config FILE`, which sets a role's values (`only` some of them, if given)."""

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
        help="TOML file with the same names (underscores for dashes); flags and environment win over it.",
    )
