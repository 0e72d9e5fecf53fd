"""A small random checkpoint, runners over it, and a scheduler that drives them."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from attention_rows import whole_sequence
from baton.attention.fp8 import E4M3
from baton.attention.registry import BACKENDS
from baton.config import WorkerConfig
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import PlanRow
from baton.engine.request import EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_pool import KvLayout, KvPool, PagePool
from baton.models.loader import declared, load_model
from baton.worker.model import attention_of, kv_layout

VOCAB = 1000
CONTEXT = 1024
CUDA = torch.device("cuda")
GREEDY = SamplingParams(temperature=0.0)

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def save_checkpoint(path: Path, **overrides: object) -> Path:
    return save_random(path, {**_CONFIG, **overrides})


def save_random(path: Path, config: dict[str, object]) -> Path:
    """Random weights for a config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    parameters = declared(path).parameters.table
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, parameter in parameters.items():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.fill == "ones":
            tensors[name] = 1 + 0.2 * noise
        else:
            tensors[name] = noise * (
                0.2 if parameter.fill == "zeros" else 1.5 / math.sqrt(parameter.shape[-1])
            )
    save_file(tensors, path / "model.safetensors")
    return path


def make(
    path: Path,
    kind: str,
    dtype: torch.dtype,
    *,
    page_size: int = 16,
    num_pages: int = 400,
    slots: int = 16,
    poison: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    quantization: str = "auto",
    draft_tokens: int = 0,
):
    """A runner and its cache; kind: "cpu", or on the GPU "plain" (without kernels, with the torch backend),
    "fa3" or "triton" (the same with that one), "graphs" or "eager" (with kernels), or these with their
    backends: "graphs:PREFILL/DECODE", or "invariant" (the batch has no say in the order of computing)."""
    device = torch.device("cpu") if kind == "cpu" else CUDA
    model = load_model(path, dtype, device, quantization=quantization)
    if kv_scales is not None:
        model.set_kv_scales(kv_scales.to(device))
    layout = kv_layout(model, page_size, CONTEXT)
    pool = PagePool(layout, num_pages, device, spare=1)
    pool.raw.view(layout.dtype).fill_(poison)
    kind, _, pair = kind.partition(":")
    if kind in ("graphs", "eager", "invariant"):
        usual = "mixed/mixed"
        if kind == "invariant":
            (chosen, _), _ = attention_of(WorkerConfig(model=str(path), batch_invariant=True), model, CUDA)
            usual = f"{chosen.name}/{chosen.name}"
        prefill, decode = (BACKENDS[name] for name in (pair or usual).split("/"))
        runner = ModelRunner(
            model,
            pool,
            max_slots=slots,
            token_budget=CONTEXT,
            context_length=CONTEXT,
            prefill_attention=prefill,
            decode_attention=decode,
            kernels=True,
            graphs=kind != "eager",
            batch_invariant=kind == "invariant",
            draft_tokens=draft_tokens,
        )
    else:
        torch_name = "torch" if model.caches[0].parts == 2 else "torch-mla"
        backend = BACKENDS[kind if kind in ("fa3", "triton") else torch_name]
        runner = ModelRunner(
            model,
            pool,
            max_slots=slots,
            prefill_attention=backend,
            decode_attention=backend,
            draft_tokens=draft_tokens,
        )
    return runner, KvCacheManager(PageAllocator(num_pages), PrefixTree(page_size, groups=layout.groups))


def tables(runner, first: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Page tables of all KV groups, with so many pages from `first` on each."""
    starts = (first + group * count for group in range(len(runner._pool.layout.groups)))
    return tuple(tuple(range(start, start + count)) for start in starts)


def generate(
    runner,
    cache,
    prompts,
    params,
    *,
    budget: int = 256,
    overlap: bool = True,
    around=None,
    grammars=(),
    drafter=None,
    draft_tokens: int = 0,
    logprobs=None,
) -> list[list[int]]:
    """Output tokens of each prompt. `around`: a context manager for each launch. `logprobs`: a dict that gets
    the log-probabilities of each prompt's output."""
    config = SchedulerConfig(
        context_length=CONTEXT, token_budget=budget, max_rows=runner.max_slots, draft_tokens=draft_tokens
    )
    scheduler = Scheduler(cache, config, drafter=drafter)
    output: dict[int, list[int]] = {}
    for key, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        output[key] = []
        grammar = grammars[key] if grammars else None
        scheduler.submit(EngineRequest(key, tuple(prompt), own, grammar=grammar))
    pending = None
    while True:
        step = scheduler.plan()
        launched = None
        if step is not None:
            if around is None:
                launched = step, runner.launch(step.plan)
            else:
                with around():
                    launched = step, runner.launch(step.plan)
        if not overlap and launched is not None:
            scheduler.commit(launched[0], runner.read(launched[1]))
            launched = None
        if pending is not None:
            scheduler.commit(pending[0], runner.read(pending[1]))
        pending = launched
        for event in scheduler.take_events():
            assert not isinstance(event, FailedEvent), event
            if isinstance(event, TokenEvent):
                output[event.sequence.request.key].append(event.token)
                if logprobs is not None:
                    logprobs.setdefault(event.sequence.request.key, []).append(event.logprobs)
        if step is None and pending is None and not scheduler.requests:
            break
    cache.check(idle=True)
    return list(output.values())


def parameters():
    """Sampling parameters, one of each kind."""
    common = {"max_tokens": 24, "stop_token_ids": frozenset({11, 12})}
    bias = dict.fromkeys(range(30), 4.0)
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(seed=1, **common),
        SamplingParams(temperature=0.7, top_k=20, seed=2, **common),
        SamplingParams(temperature=1.3, top_p=0.8, seed=3, **common),
        SamplingParams(temperature=0.9, min_p=0.1, seed=4, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, **common),
        SamplingParams(temperature=0.8, frequency_penalty=0.7, logit_bias=bias, seed=5, **common),
        SamplingParams(temperature=0.0, logit_bias=bias, min_tokens=4, **common),
        SamplingParams(temperature=0.6, logprobs=3, seed=6, **common),
        SamplingParams(temperature=0.0, logprobs=0, **common),
    ]


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """What waits for the device here raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference_logits(
    path: Path, tokens: list[int], kv_scales: torch.Tensor | None = None, *, quantization: str = "auto"
) -> torch.Tensor:
    """float32 on the CPU: logits [tokens, vocab] of the whole sequence in one pass."""
    if kv_scales is None:
        runner, _ = make(path, "cpu", torch.float32, quantization=quantization)
        row = PlanRow(0, tuple(tokens), 0, tables(runner, 0, CONTEXT // 16))
        return runner._body.logits(runner.hidden_states(row))
    model = load_model(path, torch.float32, "cpu", quantization=quantization)
    config = model.config
    model.set_kv_scales(kv_scales)
    kv, options = model.caches[0], model.attention_options
    layout = KvLayout(config.num_layers, kv.heads, kv.head_dim, CONTEXT, E4M3, kv.parts)
    name = "torch" if kv.parts == 2 else "torch-mla"
    backend = BACKENDS[name](KvPool(layout, 1), config.num_heads, options)
    with torch.inference_mode():
        batch = whole_sequence(tokens, backend, options)
        hidden = model.forward(batch)
        return model.logits(hidden)


def assert_nearly_greedy(path, prompts, outputs):
    """Rounding may change which experts a token uses: then its logits lie further off."""
    gaps = []
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(path, prompt + output)[len(prompt) - 1 : -1]
        gaps.append(logits.amax(1) - logits.gather(1, torch.tensor(output)[:, None]).squeeze(1))
    gap = torch.cat(gaps)
    shares = (gap > 0.3).float().mean().item(), (gap > 0).float().mean().item()
    assert shares[0] <= 0.05 and shares[1] <= 0.15, shares
