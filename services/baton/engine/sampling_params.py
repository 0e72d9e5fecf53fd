"""Sampling parameters of the engine: complete, checked, immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from baton.grammar.base import GrammarSpec


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence's next tokens are chosen. Every value has been checked (rpc.validate).

    Stop strings are not here: they are text, which the engine does not know.
    """

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    """Seed of choice 0, 0 <= seed < 2**64; choice i uses (seed + i) mod 2**64."""
    max_tokens: int = 1
    """Output tokens at most, including those delivered by earlier attempts."""
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output; without ignore_eos they include the model's own."""
    logprobs: int | None = None
    """None: no log-probabilities; k: of the chosen token and of the k most likely."""
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    """What the output must be. The compiled form goes beside it: Request.grammar."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether sampling needs to know which tokens occurred before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
