"""Measurements of an engine and its host, as `baton bench profile` writes and `baton plan` reads them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from baton.stepcost import StepCost, read_cost

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The sizes of a worker; its defaults are those of a CPU worker with the demo model."""

    page_size: Count = 16
    kv_tokens: Count = 65536
    context_length: Count = 2048
    max_rows: Count = 64
    token_budget: Count = 512
    page_bytes: Count = 49152
    overlap: bool = False
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PullCost:
    """Of a pull between two pools."""

    latency: Seconds = 0.0
    bytes_per_second: Annotated[float, Field(gt=0)] = float("inf")
    seen: bool = True
    """The receiver sees the owner's generations; else it waits for the answer to its release."""
    transport: str = ""

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class HostCost:
    """Seconds that pass around the steps."""

    turn: Seconds = 0.0
    """Between a step's end and the next one's launch."""
    row: Seconds = 0.0
    """More of that for each row of the step."""
    request: Seconds = 0.0
    """Of a request at the gateway and of its first token on the way back."""
    hop: Seconds = 0.0
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
    content = json.loads(path.read_text())
    parts = {part: content[part] for part in ("engine", "pull", "host") if part in content}
    missing = tuple(part for part in ("engine", "pull", "host") if part not in content)
    try:
        return TypeAdapter(Profile).validate_python({"step": step, "missing": missing, **parts})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"{where}: {first['msg']}, not {first['input']!r}"
        raise ValueError(f"{path} is no profile of `baton bench profile`: {text}") from None
