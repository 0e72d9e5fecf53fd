"""Small random checkpoints made and saved by transformers, and a driver that runs plans on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from baton.attention.registry import resolve
from baton.engine.model_runner import LaunchedStep, ModelRunner
from baton.engine.plan import PlanRow, RowResult, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.kvcache import NO_PAGE
from baton.kvcache.kv_pool import PagePool
from baton.models.loader import load_model
from baton.worker.model import kv_layout

VOCAB = 160
GREEDY = SamplingParams(temperature=0.0)
TIE = 1e-5
"""Logits that are closer may change places from one processor to another."""

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rope(kind: str, **parameters: float) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LATENT: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}

_INDEX: dict[str, object] = {
    "q_lora_rank": 24,
    "index_topk": 16,
    "index_n_heads": 16,  # few give equal scores: 0
    "index_head_dim": 24,
}
"""Of sparse attention."""

Variant = tuple[type, dict[str, object]]
"""Class of the configuration, and what differs from _SMALL."""

_GEMMA4: dict[str, object] = {
    "pad_token_id": None,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
}

VARIANTS: dict[str, Variant] = {
    "gemma4": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma4-shared": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma4-experts": (
        Gemma4TextConfig,
        {
            **_GEMMA4,
            "attention_bias": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-bias": (Qwen3Config, {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 2}),
    "qwen2-tied": (Qwen2Config, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama3": (
        LlamaConfig,
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama4": (
        Llama4TextConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "attention_chunk_size": 24,
            "moe_layers": [1, 2],
            "intermediate_size_mlp": 80,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "floor_scale": 16,
            "attn_scale": 0.7,
        },
    ),
    "llama4-plain": (
        Llama4TextConfig,
        {
            "head_dim": 32,
            "attention_chunk_size": 32,
            "num_local_experts": 4,
            "attention_bias": True,
            "use_qk_norm": False,
            "layer_types": ["full_attention", "chunked_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "llama-bias-linear": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, **_rope("linear", factor=4.0)},
    ),
    "smollm": (
        LlamaConfig,
        {
            "hidden_size": 576,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "llama-yarn": (LlamaConfig, _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-dynamic": (LlamaConfig, _rope("dynamic", factor=4.0)),
    "deepseek-v2": (
        DeepseekV2Config,
        {
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.7,
                mscale_all_dim=0.9,
            ),
        },
    ),
    "deepseek-v3": (DeepseekV3Config, {**_LATENT, "q_lora_rank": 24}),
    "deepseek-v3.2": (DeepseekV32Config, {**_LATENT, **_INDEX}),
    "glm-5": (
        GlmMoeDsaConfig,
        {
            **_LATENT,
            **_INDEX,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
            },
        },
    ),
    "gpt-oss": (
        GptOssConfig,
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "phi3": (Phi3Config, {"pad_token_id": None, "sliding_window": 48}),
    "phi3-longrope": (
        Phi3Config,
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 256,
            "num_attention_heads": 2,
            **_rope(
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0 + i / 8 for i in range(12)],
                long_factor=[2.0 + i / 4 for i in range(12)],
            ),
        },
    ),
    "mistral": (MistralConfig, {"head_dim": 32, "sliding_window": None}),
    "mistral-window": (MistralConfig, {"head_dim": 16, "sliding_window": 32}),
    "qwen2-window": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3-moe": (
        Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    ),
    "qwen3-moe-dense": (
        Qwen3MoeConfig,
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": 32}),
    "glm4-moe": (
        Glm4MoeConfig,
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    "glm4-moe-one-group": (
        Glm4MoeConfig,
        {
            "head_dim": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
}


def save_checkpoint(
    variant: str, path: Path, *, shards: bool = False, variants: Mapping[str, Variant] = VARIANTS
) -> torch.nn.Module:
    """Saves the variant's checkpoint to `path`; returns the transformers model, float32."""
    transformers.utils.logging.disable_progress_bar()
    make, overrides = variants[variant]
    torch.manual_seed(len(variant))
    model = AutoModelForCausalLM.from_config(make(**{**_SMALL, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Neither norms of 1 nor biases of 0, which would hide that they are not applied.
            if parameter.dim() == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
                if "q_norm" in name and make is Gemma4TextConfig:
                    parameter.mul_(0.25)  # scores have no scale: sharper ones would show how each side rounds
            else:
                parameter.normal_(0.0, 1.5 / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.fill_(0.7)
    model.save_pretrained(path, max_shard_size="60KB" if shards else "5GB")
    return model


def saved_on_demand(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """variant -> (path, transformers model)"""

    @cache
    def get(variant: str) -> tuple[Path, torch.nn.Module]:
        path = tmp_path_factory.mktemp(variant)
        return path, save_checkpoint(variant, path)

    return get


@dataclass
class Track:
    """One sequence that the driver runs in the slot of the same number."""

    slot: int
    tokens: list[int]
    """Prompt and output, as far as it has been read."""
    tables: list[tuple[int, ...]]
    """The page table of each KV group."""
    computed: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each position that sampled."""


class Driver:
    """Launches each step before it reads the one before; records the logits of all sampled positions. With
    several KV groups a row's page tables name only what it sees."""

    def __init__(
        self,
        path: Path,
        *,
        page_size: int = 16,
        num_pages: int = 64,
        slots: int = 8,
        dtype: torch.dtype = torch.float32,
        storage: memoryview | None = None,
        own_pool: bool = False,
        **options: object,
    ) -> None:
        """`storage`: of a pool that other ranks share; `own_pool`: of its part of pages alone, as on GPUs."""
        self.model = load_model(path, dtype, **options)
        layout = kv_layout(self.model, page_size, self.model.config.context_length)
        num_pages *= len(layout.groups)
        shard = self.model.shard
        heads = shard.kv_heads(layout.num_kv_heads) if shard.size > 1 else None
        if own_pool and heads is not None:
            layout, heads = layout.with_heads(heads[1]), None
        self.pool = PagePool(layout, num_pages, storage=storage, heads=heads)
        self.pool.raw.view(layout.dtype).fill_(math.nan)  # memory that nothing may read before it is written
        features = frozenset[str]().union(*(options.features for options in self.model.attention_options))
        features |= {"states"} if layout.states else set()
        backend, _ = resolve("auto", torch.device("cpu"), features=features)
        self.runner = ModelRunner(
            self.model, self.pool, max_slots=slots, prefill_attention=backend, decode_attention=backend
        )
        self.tracks: dict[int, Track] = {}
        self.number = 0
        self._free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self._launched: LaunchedStep | None = None
        self._recorded: list[torch.Tensor] = []
        plain = self.model.logits
        self.model.logits = lambda hidden: self._record(plain(hidden))  # type: ignore[method-assign]

    def _record(self, logits: torch.Tensor) -> torch.Tensor:
        self._recorded.append(logits.clone())
        return logits

    def take(self, tokens: int) -> tuple[int, ...]:
        """Shuffled free pages for so many tokens."""
        count = -(-tokens // self.pool.layout.page_size)
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count
        return tuple(taken)

    def add(
        self, slot: int, prompt: Sequence[int], room: int, cached: Track | None = None, prefix: int = 0
    ) -> Track:
        """A new sequence; the first `prefix` tokens' pages are those of `cached`."""
        count = prefix // self.pool.layout.page_size
        shared = [()] * len(self.pool.layout.groups)
        if cached is not None:
            shared = [table[:count] for table in cached.tables]
        tables = [each + self.take(len(prompt) + room - prefix) for each in shared]
        self.tracks[slot] = Track(slot, list(prompt), tables, prefix)
        return self.tracks[slot]

    def tables(self, track: Track, start: int) -> tuple[tuple[int, ...], ...]:
        """Page tables for a row that begins at `start`."""
        layout, found = self.pool.layout, []
        for group, table in zip(layout.groups, track.tables, strict=True):
            first = group.spec.sees(start, layout.page_size)
            found.append((NO_PAGE,) * first + table[first:])
        return tuple(found)

    def chunk(self, track: Track, count: int, *, sample: bool = False) -> PlanRow:
        start = track.computed
        track.computed += count
        tokens = tuple(track.tokens[start : start + count])
        sampling = (track.slot,) if sample else ()
        return PlanRow(track.slot, tokens, start, self.tables(track, start), sampling)

    def decode(self, track: Track) -> PlanRow:
        track.computed += 1
        start = track.computed - 1
        return PlanRow(track.slot, None, start, self.tables(track, start), (track.slot,))

    def init(self, track: Track, params: SamplingParams = GREEDY, prompt: int | None = None) -> SlotInit:
        cut = len(track.tokens) if prompt is None else prompt
        return SlotInit(track.slot, params, params.seed, tuple(track.tokens[:cut]), tuple(track.tokens[cut:]))

    def step(
        self,
        rows: Sequence[PlanRow],
        inits: Sequence[SlotInit] = (),
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.number += 1
        self._recorded.clear()
        launched_step = self.runner.launch(StepPlan(self.number, tuple(rows), tuple(inits), tuple(copies)))
        sampling = [row for row in rows if row.sample]
        if sampling:
            for row, logits in zip(sampling, self._recorded[0], strict=True):
                self.tracks[row.slot].logits[row.start + row.count] = logits
        self.finish()
        self._launched = launched_step

    def finish(self) -> tuple[RowResult, ...]:
        """Reads the step in flight."""
        if self._launched is None:
            return ()
        planned, result = self._launched.rows, self.runner.read(self._launched)
        self._launched = None
        for plan, row in zip(planned, result.rows, strict=True):
            assert row.error is None, row.error
            for slot, token in zip(plan.sample, row.tokens, strict=True):
                self.tracks[slot].tokens.append(token)
        return result.rows

    def answer(self, slot: int, prompt: Sequence[int], count: int) -> Track:
        """A sequence alone: its prompt in one chunk, and so many tokens."""
        track = self.add(slot, prompt, count)
        self.step([self.chunk(track, len(prompt), sample=True)], [self.init(track)])
        for _ in range(count - 1):
            self.step([self.decode(track)])
        self.finish()
        return track


def random_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def greedy_reference(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def check_greedy(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> None:
    """The tokens are those of `generate()`, as far as its two best logits differ by more than processors
    round them."""
    expected = greedy_reference(model, prompt, len(tokens))
    if tokens == expected:
        return
    at = next(i for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=True)) if ours != theirs)
    with torch.no_grad():
        best = model(torch.tensor([[*prompt, *expected[:at]]])).logits[0, -1].float().topk(2)
    tie = {tokens[at], expected[at]} == set(best.indices.tolist()) and -best.values.diff().item() < TIE
    assert tie, f"token {at} of {tokens} is not that of {expected}"


def largest_difference(model: torch.nn.Module, track: Track) -> float:
    """Between the logits that the driver recorded and those of one forward pass over the sequence."""
    with torch.no_grad():
        expected = model(torch.tensor([track.tokens])).logits[0].float()
    return max((logits - expected[at - 1]).abs().max().item() for at, logits in track.logits.items())


def check_logits(path: Path, model: torch.nn.Module, tolerance: float = 1e-4, **options: object) -> None:
    """Of a checkpoint loaded with these options, against a transformers model."""
    track = Driver(path, **options).answer(0, random_prompts(40)[0], 5)
    assert largest_difference(model, track) < tolerance
