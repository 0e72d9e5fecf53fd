"""What drafts gain where they are right as often as published heads are: milliseconds a token.

    python benchmarks/draft_speed.py --model 8b --out DIR
    python benchmarks/draft_speed.py --model 30b-a3b --cases 1:3:3.0:head --out DIR

A case is ROWS:DRAFTS:TOKENS:DRAFTER: TOKENS delivered a step, the one without a draft included. Drafts are a
model's own tokens (an oracle's), spoiled so often that this many are delivered. With `head` an EAGLE-sized
head of random weights (a layer of the model's width, a draft vocabulary of 32,000) computes each step's
drafts, which the oracle's then take the place of; with `none` nothing is computed for them, as for suffixes.
Beside each case the same requests without drafts, in the same process. Times are those of steps in which all
streams run. Writes DIR/draft_speed.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.bench.engine_bench import EngineBench, EngineRun
from baton.bench.machine import machine, versions
from baton.bench.workload import TokenRange, Workload
from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.draft.oracle import OracleDrafter, prompt_digest
from baton.engine.request import Sequence as TokenSequence
from baton.models.config import read_config
from baton.rpc.logs import configure

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape

CASES = "1:5:3.5:head,1:4:3.0:none,64:3:2.5:head,64:3:2.5:none"
DRAFT_VOCABULARY = 32_000
TEMPERATURE = 50.0
"""So high that the noise of (seed, position, token) decides. Random weights have near ties, which steps with
other rows round otherwise; behind such a token the oracle would know nothing."""
CALIBRATIONS = 3
"""Runs that find how often drafts must be spoiled; the first one also warms up."""


class Told(Drafter):
    """Drafts of an oracle, with the passes of a head or without."""

    def __init__(self, head: Drafter | None, oracle: Drafter) -> None:
        self._head, self._oracle = head, oracle
        self.computes = head is not None
        self.seen: dict[TokenSequence, None] = {}
        self.asked = 0

    def prepare(self, wanted: Sequence[tuple[TokenSequence, int]]) -> None:
        if self._head is not None:
            self._head.prepare(wanted)

    def observe(self, sequence: TokenSequence, start: int, hidden: torch.Tensor) -> None:
        if self._head is not None:
            self._head.observe(sequence, start, hidden)

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        self.seen[sequence] = None
        self.asked += 1
        return self._oracle.draft(sequence, most)


class Known(OracleDrafter):
    """Drafts wrong tokens where it knows nothing; leaves `sequence.drafting` to a head."""

    def __init__(self, outputs: dict[str, tuple[int, ...]], right: float) -> None:
        super().__init__((), right)
        self._outputs = outputs

    def draft(self, sequence: TokenSequence, most: int) -> Sequence[int]:
        prompt = sequence.request.prompt
        known = self._outputs.get(prompt_digest(prompt), ())
        count = len(sequence.tokens) - len(prompt)
        if known[:count] != tuple(sequence.tokens[len(prompt) :]):
            known = ()
        found = [self._spoiled(token, count + i) for i, token in enumerate(known[count : count + most])]
        return found or [sequence.tokens[-1] ^ 1] * most


def rate_for(tokens: float, drafts: int) -> float:
    """Chance of each draft with which a step delivers so many tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < tokens else (low, middle)
    return low


def write_head(model: Path, path: Path) -> None:
    """An EAGLE-3 head of random weights for this model."""
    config = read_config(model)
    hidden, inner, dim = config.hidden_size, 3 * config.hidden_size, min(128, config.head_dim)
    heads, kv_heads = hidden // dim, config.num_kv_heads
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * dim),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    drafts = min(DRAFT_VOCABULARY, config.vocab_size)
    shapes["lm_head"] = (drafts, hidden)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=torch.bfloat16)
        tensors[f"{name}.weight"] = weight.normal_(0, shape[1] ** -0.5, generator=generator)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(drafts, dtype=torch.int64)
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": drafts,
    }
    if config.num_layers < 6:  # fewer than the format's default layers need
        own["eagle_aux_hidden_state_layer_ids"] = [0, 1, 2]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(own))
    save_file(tensors, path / "model.safetensors")


def milliseconds(run: EngineRun, rows: int) -> float:
    """Of a token of a stream, while all streams run."""
    return sum(run.step_seconds) * rows / run.step_tokens * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", help="a shape of tools/make_shape.py, or a checkpoint")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-tokens", type=int, default=100_000)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    cases = [tuple(case.split(":")) for case in options.cases.split(",")]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model, load = options.model, "auto"
        if not Path(model).exists():
            model, load = str(Path(folder) / "model"), "dummy"
            write_shape(options.model, Path(model))
        write_head(Path(model), Path(folder) / "head")
        bench = EngineBench(
            DecodeConfig(
                draft=str(Path(folder) / "head"),
                draft_tokens=max(int(case[1]) for case in cases),
                model=model,
                load_format=load,
                device=options.device,
                kv_tokens=options.kv_tokens,
                max_rows=options.max_rows,
                token_budget=options.budget,
            )
        )
        for rows, drafts, tokens, drafter in cases:
            line = measure(bench, int(rows), int(drafts), float(tokens), drafter == "head", options)
            found.append(line)
            print(" ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items()))
            sys.stdout.flush()
    report = {"machine": machine(), "versions": versions(""), "facts": bench.facts(), "cases": found}
    (options.out / "draft_speed.json").write_text(json.dumps(report, indent=1))
    bench.close()


def measure(
    bench: EngineBench, rows: int, drafts: int, tokens: float, head: bool, options: argparse.Namespace
) -> dict[str, float | int | str]:
    work = Workload(
        prompt_tokens=TokenRange(options.prompt, options.prompt),
        output_tokens=TokenRange(options.output, options.output),
        requests=rows,
        seed=1,
    )
    jobs = work.jobs(bench.vocabulary, bench.context)
    computing = bench.engine.drafter.drafter if head and bench.engine.drafter else None
    runs = [bench.run(jobs, TEMPERATURE) for _ in range(options.repeats + 1)][1:]
    plain = statistics.median(milliseconds(run, rows) for run in runs)
    plain_step = statistics.median(run.tpot or 0.0 for run in runs) * 1e3
    # Outputs as rows with drafts compute them: in 16 bits those of rows of one token may differ.
    outputs: dict[str, tuple[int, ...]] = {}
    for _ in range(2):
        told = Told(None, Known(outputs, 1.0))
        bench.run(jobs, TEMPERATURE, drafter=told, draft_tokens=drafts)
        outputs = {
            prompt_digest(each.request.prompt): tuple(each.tokens[len(each.request.prompt) :])
            for each in told.seen
        }
    drafted, steps, goal = [], [], tokens
    for repeat in range(CALIBRATIONS + options.repeats):
        if 0 < repeat < CALIBRATIONS:  # a few hundred drafts are not right as often as their chance
            goal = min(goal * tokens / steps[-1], drafts + 1.0)
        told = Told(computing, Known(outputs, rate_for(goal, drafts)))
        run = bench.run(jobs, TEMPERATURE, drafter=told, draft_tokens=drafts)
        drafted.append(run)
        steps.append(run.step_tokens / len(run.step_seconds) / rows)
    runs = drafted[CALIBRATIONS:]
    median = statistics.median(milliseconds(run, rows) for run in runs)
    return {
        "rows": rows,
        "drafts": drafts,
        "drafter": "head" if head else "none",
        "wanted_a_step": tokens,
        "delivered_a_step": statistics.median(steps[CALIBRATIONS:]),
        "plain_ms": plain,
        "drafted_ms": median,
        "times_faster": plain / median,
        "plain_step_ms": plain_step,
        "step_ms": statistics.median(run.tpot or 0.0 for run in runs) * 1e3,
        "host_ms": statistics.median(sum(run.host.values()) for run in runs) * 1e3,
    }


if __name__ == "__main__":
    main()
