"""The architectures that are served: one decoder with small differences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties implied by the class name and not stated in config.json."""

    name: str
    qk_norm: bool = False
    """Queries and keys of each head pass an RMS norm before the rotation."""
    qkv_bias: bool = False
    """The query, key and value projections always have a bias, the output projection never."""


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("LlamaForCausalLM"),
        Architecture("MistralForCausalLM"),
        Architecture("Qwen2ForCausalLM", qkv_bias=True),
        Architecture("Qwen3ForCausalLM", qk_norm=True),
    )
}
