"""What constrained rows cost those beside them, and what a mask costs.

    python benchmarks/structured_output.py --json benchmarks/results/structured_output.json
    python benchmarks/structured_output.py --device cuda --shape 8b

One engine, on one core of a CPU or on a GPU, driven as a decode node's step thread drives it, without other
processes (those are in structured_streams.py). Rounds of 64 free streams, of 32 free ones beside 32
constrained by a JSON Schema, and of 64 constrained ones take turns: short ones, since the speed of a shared
machine wanders by more, in ten seconds, than what is measured. The time between two tokens of a stream is the
time of a step. On a GPU, host time is that of a step without waiting for the device. A shared
machine disturbs single steps: the medians of all rounds count, and the processor time of the process, the
threads that compute masks included. Single masks are timed afterwards, for some of the outputs, one after
the other.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from shared import make_parser, save_results

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import SHAPES, write_shape

from baton.cli.console import table
from baton.config import DecodeConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_loop import StepPipeline
from baton.grammar.base import CompiledGrammar, GrammarError, GrammarSpec
from baton.grammar.llguidance import LlguidanceMatcher
from baton.worker.decode.core import DecodeCore
from baton.worker.decode.types import Key
from baton.worker.engine import build_engine

ROWS, KINDS = 64, {"64 free": 0, "32 free beside 32 constrained": 32, "64 constrained": 64}
REPLAYED = 64
"""Outputs whose masks are timed one by one."""
PROMPT = 64
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["function", "class", "module"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,12}$"}, "maxItems": 4},
    },
    "required": ["name", "kind", "line", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 10_000}
"""Longer than any output here."""


class NotedMatcher(LlguidanceMatcher):
    """Notes the output."""

    output: list[int]

    @classmethod
    def fill_all(cls, matchers: Any, tokens: Sequence[Sequence[int]], words: Any) -> dict[int, GrammarError]:
        for matcher, own in zip(matchers, tokens, strict=True):
            matcher.output += own
        return super().fill_all(matchers, tokens, words)


class NotedGrammar:
    def __init__(self, grammar: Any) -> None:
        self.grammar = grammar
        self.outputs: list[list[int]] = []

    def matcher(self) -> NotedMatcher:
        made = self.grammar.matcher()
        noted = NotedMatcher(made._matcher, made._usable)
        noted.output = []
        self.outputs.append(noted.output)
        return noted


def single_masks(grammar: CompiledGrammar, outputs: Sequence[Sequence[int]], vocab_size: int) -> list[float]:
    """Seconds of each mask, the token before it included."""
    words = np.empty(-(-vocab_size // 32), np.int32)
    times: list[float] = []
    for output in outputs:
        matcher = grammar.matcher()
        for token in output:
            began = time.perf_counter()
            matcher.accept([token])
            matcher.fill(words)
            times.append(time.perf_counter() - began)
    return times


@dataclass
class Round:
    """Seconds of steps."""

    elapsed: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    """Without waiting for the device."""
    thread: list[float] = field(default_factory=list)
    """The step thread on a processor."""
    process: list[float] = field(default_factory=list)
    """The process on processors: the mean of a round."""

    def add(self, other: Round) -> None:
        self.elapsed += other.elapsed
        self.host += other.host
        self.thread += other.thread
        self.process += other.process


class Shell:
    """Of a core whose outputs nobody wants."""

    def send(self, step: int, outputs: object, effects: object) -> None: ...

    def retire(self, step: int) -> None: ...

    def observe(self) -> None: ...


class Engine:
    def __init__(self, model: str, load_format: str, device: str, tokens: int) -> None:
        config = DecodeConfig(
            model=model,
            load_format=load_format,
            device=device,
            threads=1,
            max_rows=ROWS,
            kv_tokens=2 * ROWS * (PROMPT + tokens + 128),
            transports=("grpc",),
        )
        self.engine = build_engine(config, 1)
        info = self.engine.model_info
        limits = SchedulerConfig(info.context_length, self.engine.config.token_budget, ROWS)
        self.core = DecodeCore(self.engine.cache, limits, config, Shell())
        self.pipeline = StepPipeline(self.core, self.engine.runner, self.engine.overlap, time.monotonic)
        self.tokens, self.number = tokens, 0
        assert self.engine.grammars is not None
        spec = GrammarSpec("json_schema", json.dumps(SCHEMA))
        outcome = self.engine.grammars.submit(spec).result(120)
        assert not isinstance(outcome, GrammarError), outcome
        self.spec, self.grammar = spec, NotedGrammar(outcome)

    def round(self, constrained: int) -> Round:
        """Counts steps of all rows only."""
        rng = np.random.default_rng(self.number)
        for row in range(ROWS):
            self.number += 1
            bound = row < constrained
            params = SamplingParams(
                temperature=1.0,
                seed=self.number,
                max_tokens=self.tokens,
                grammar=self.spec if bound else None,
            )
            prompt = tuple(rng.integers(10, self.engine.model_info.vocab_size, PROMPT).tolist())
            key = Key("benchmark", self.number)
            request = EngineRequest(key, prompt, params, grammar=self.grammar if bound else None)
            self.core.start(key, 1, 0, request, (), time.monotonic())
        found, used = Round(), 0.0
        while self.core.requests:
            full = len(self.core.scheduler.running) == ROWS
            began, thread, cpu = time.perf_counter(), time.thread_time(), time.process_time()
            due = self.pipeline.begin()
            launched = time.perf_counter()
            while due is not None and not self.pipeline.ended(due):
                pass
            waited = time.perf_counter() - launched
            if due is not None:
                self.pipeline.finish(due)
            if full:
                found.elapsed.append(time.perf_counter() - began)
                found.host.append(found.elapsed[-1] - waited)
                found.thread.append(time.thread_time() - thread)
                used += time.process_time() - cpu
        found.process.append(used / len(found.elapsed))
        return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=24, help="of each kind")
    parser.add_argument("--tokens", type=int, default=40, help="of each output")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights, in place of --model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is not None:
            write_shape(args.shape, Path(folder))
        model, load_format = (args.model, "auto") if args.shape is None else (folder, "dummy")
        engine = Engine(model, load_format, args.device, args.tokens)
    for kind in KINDS.values():
        engine.round(kind)  # warms up
    rounds = {kind: Round() for kind in KINDS.values()}
    stats = engine.engine.masks
    masks, seconds, waited = stats.masks, stats.seconds, stats.waited
    for _ in range(args.rounds):
        for kind in KINDS.values():
            rounds[kind].add(engine.round(kind))
    vocab_size, outputs = engine.engine.model_info.vocab_size, engine.grammar.outputs[-REPLAYED:]
    mask = np.array(single_masks(engine.grammar.grammar, outputs, vocab_size)) * 1e6
    bound_steps = len(rounds[32].elapsed) + len(rounds[64].elapsed)

    def medians(of: str) -> dict[str, float]:
        milliseconds = {
            name: 1e3 * float(np.median(getattr(rounds[kind], of))) for name, kind in KINDS.items()
        }
        free, mixed, _ = milliseconds.values()
        return milliseconds | {"ratio of the second to the first": mixed / free}

    found = {
        "itl_p50_ms": medians("elapsed"),
        "host_p50_ms": medians("host"),
        "step_thread_cpu_p50_ms": medians("thread"),
        "process_cpu_ms_a_step": medians("process"),
        "mask_us": {
            name: float(np.percentile(mask, q)) for name, q in (("p50", 50), ("p99", 99), ("max", 100))
        },
        "masks": stats.masks - masks,
        "masks_ms_a_step": 1e3 * (stats.seconds - seconds) / bound_steps,
        "waited_us_a_step": 1e6 * (stats.waited - waited) / bound_steps,
        "vocabulary": vocab_size,
    }
    rows = table("figure", "value")
    for name, value in found.items():
        shown = value if not isinstance(value, dict) else {k: round(v, 2) for k, v in value.items()}
        rows.add_row(name, str(round(shown, 4) if isinstance(shown, float) else shown))
    Console().print(rows)
    setting = {
        "model": args.shape or args.model,
        "device": args.device,
        "rounds": args.rounds,
        "tokens": args.tokens,
        "schema": SCHEMA,
    }
    save_results(args, {"setting": setting, "figures": found})


if __name__ == "__main__":
    main()
