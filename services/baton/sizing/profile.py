"""Measurements of an engine and its host, as `baton bench profile` writes and `baton plan` reads them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from baton.kvcache import KvGroup
from baton.kvcache.kv_groups import longest
from baton.layers.cache_spec import attention_cache
from baton.step_cost import StepCost, read_cost

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Sizes of a worker; the defaults are a CPU worker's with the demo model."""

    page_size: Count = 16
    kv_tokens: Count = 65536
    context_length: Count = 2048
    max_rows: Count = 64
    token_budget: Count = 512
    page_bytes: Count = 49152
    overlap: bool = False
    device: str = "cpu"
    ranks: Count = 1
    """Processes of a worker, each with a device (or cores) of its own."""
    windows: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Windows of the model's KV groups; 0: none."""

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        return tuple(KvGroup(attention_cache(window or None)) for window in self.windows)

    @property
    def pages(self) -> int:
        return self.kv_tokens // self.page_size * len(self.windows)

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return longest(self.groups, self.pages, self.context_length, self.page_size, 2 * self.token_budget)


@dataclass(frozen=True, slots=True)
class MeasuredPullCost:
    """Cost of a pull between two pools."""

    latency: Seconds = 0.0
    bytes_per_second: Annotated[float, Field(gt=0)] = float("inf")
    seen: bool = True
    """The receiver sees the owner's generations; else it waits for the answer to its release."""
    transport: str = ""

    def seconds(self, size: int) -> float:
        return self.latency + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class HostCost:
    """Time beside the steps."""

    turn: Seconds = 0.0
    """From a step's end to the next launch."""
    row: Seconds = 0.0
    """Added to `turn` for each row of the step."""
    request: Seconds = 0.0
    """A request's time in the gateway, and its first token's on the way back."""
    hop: Seconds = 0.0
    """A message from a decode node's step thread to a prefill node's, or back."""


@dataclass(frozen=True, slots=True)
class Profile:
    step: StepCost
    engine: EngineFacts = EngineFacts()
    pull: MeasuredPullCost = MeasuredPullCost()
    host: HostCost = HostCost()
    missing: tuple[str, ...] = ()
    """Parts that the file lacks; they have the defaults above."""


def to_dict(profile: Profile) -> dict[str, Any]:
    """For JSON; without the missing parts."""
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
