"""What has been measured of an engine and the host around it: `baton bench profile` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from baton.stepcost import StepCost, read_cost


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The sizes of a worker; its defaults are those of a CPU worker with the demo model."""

    page_size: int = 16
    kv_tokens: int = 65536
    context_length: int = 2048
    max_rows: int = 64
    token_budget: int = 512
    page_bytes: int = 49152
    overlap: bool = False
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PullCost:
    """Of a pull between two pools."""

    latency: float = 0.0
    """Seconds."""
    bytes_per_second: float = float("inf")
    seen: bool = True
    """The receiver sees the owner's generations; else it waits for the answer to its release."""
    transport: str = ""

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds that pass around the steps."""

    turn: float = 0.0
    """Between a step's end and the next one's launch."""
    row: float = 0.0
    """More of that for each row of the step."""
    request: float = 0.0
    """Of a request at the gateway and of its first token on the way back."""
    hop: float = 0.0
    """Of a message from a decode node's step thread to a prefill node's, or back."""


@dataclass(frozen=True, slots=True)
class Profile:
    step: StepCost
    engine: EngineFacts = EngineFacts()
    pull: PullCost = PullCost()
    host: HostCost = HostCost()
    missing: tuple[str, ...] = ()
    """Parts that its file does not have; they are assumed to be as above."""


def to_dict(profile: Profile) -> dict[str, Any]:
    """For JSON. What is not known is left out."""
    found = {part: asdict(getattr(profile, part)) for part in ("step", "engine", "pull", "host")}
    if found["pull"]["bytes_per_second"] == float("inf"):
        del found["pull"]["bytes_per_second"]
    return {part: values for part, values in found.items() if part not in profile.missing}


def read_profile(path: Path) -> Profile:
    """Raises ValueError with one line for people."""
    step = read_cost(path)
    found: dict[str, Any] = json.loads(path.read_text())
    try:
        profile = Profile(
            step,
            EngineFacts(**_known(EngineFacts, found)),
            PullCost(**_known(PullCost, found)),
            HostCost(**_known(HostCost, found)),
            tuple(part for part in _PARTS.values() if part not in found),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is no profile of `baton bench profile`: {error}") from error
    wrong = [name for name in _NUMBERS if getattr(profile.engine, name) < 1]
    if wrong:
        raise ValueError(f"profile {path}: engine.{wrong[0]} must be 1 or more")
    if min(profile.pull.latency, profile.host.turn, profile.host.row, profile.host.request) < 0:
        raise ValueError(f"profile {path} has a cost below 0")
    if profile.pull.bytes_per_second <= 0 or profile.host.hop < 0:
        raise ValueError(f"profile {path} has a cost below 0")
    return profile


_PARTS: dict[type, str] = {EngineFacts: "engine", PullCost: "pull", HostCost: "host"}
_NUMBERS = ("page_size", "kv_tokens", "context_length", "max_rows", "token_budget", "page_bytes")


def _known(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Of a part of the file: the values that a class has, each of the default's type. Raises ValueError."""
    values: dict[str, Any] = {}
    given = found.get(_PARTS[kind], {})
    if not isinstance(given, dict):
        raise ValueError(f"{_PARTS[kind]} is {given!r}")
    for field in fields(kind):
        if field.name in given:
            value = given[field.name]
            if isinstance(field.default, bool | str) != isinstance(value, bool | str):
                raise ValueError(f"{_PARTS[kind]}.{field.name} is {value!r}")
            default: Any = field.default
            values[field.name] = type(default)(value)
    return values
