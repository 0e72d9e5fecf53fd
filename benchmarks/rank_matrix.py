"""Workers of several ranks give the tokens of one rank: all families, pairs of sizes, both transports.

    python benchmarks/rank_matrix.py [--families qwen3,deepseek] [--pairs 1:2,4:2] [--transports shm]

For each family of tests/cluster/checkpoints.py a small model with random weights in float32. Of each, through
gateway, tokenizer, prefill and decode processes:

- prefill to decode node of 1 to 2, 2 to 2, 2 to 1, 2 to 4 and 4 to 2 ranks, over shm and grpc; greedy, 64
  tokens, each prompt twice: in no cache, then in both. The reference is transformers, whose two best logits
  differ by more than 1e-3 at each position.
- the same sampled with seeds, with penalties and two choices; the reference is a worker of one rank.
- retraction: more tokens than the pool of a node of two ranks holds.
- resume: a follower is killed while requests run; they go on at the node of one rank.

The exit code is 1 if a token differs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

import psutil
from asking import ask, greedy
from checkpoints import ARCHITECTURES, make_model, save
from deployment import Deployment
from polling import until
from process import Process
from reference import Answer, Reference
from shared import make_parser, save_results
from spare_followers import NAME as FOLLOWER

from baton.client import Completion

Sizes = tuple[int, int]
"""Ranks of the prefill node, of the decode node."""
PAIRS = "1:2,2:2,2:1,2:4,4:2"
LENGTHS = [1, 16, 33, 64, 160]
OUTPUT = 64
OPTIONS = ("--kv-tokens", "4096")
TIGHT = ("--kv-tokens", "640", "--output-margin", "0")
SAMPLED = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.3, "n": 2}
SECONDS = 240.0


class Family:
    """Its deployment: a worker of each size and role, decode nodes for each transport."""

    def __init__(self, name: str, folder: Path, pairs: Sequence[Sizes], transports: Sequence[str]) -> None:
        model = make_model(name)
        self.answers = Reference(model).answers(LENGTHS, OUTPUT)
        self.deployment = deployment = Deployment(folder, save(model, folder / "model"))
        prefill = {tp: self._worker("prefill", tp) for tp in sorted({sizes[0] for sizes in pairs})}
        needed = {(sizes[1], kind) for sizes in pairs for kind in transports} | {(1, "shm"), (2, "shm")}
        self.decode = {
            (tp, kind): self._worker("decode", tp, "--transports", kind) for tp, kind in sorted(needed)
        }
        self.tight = deployment.add_worker("decode", *TIGHT, "--tp", "2")
        self.pairs = {
            (sizes, kind): deployment.add_gateway([self.decode[sizes[1], kind]], [prefill[sizes[0]]])
            for sizes in pairs
            for kind in transports
        }
        self.one_rank = deployment.add_gateway([self.decode[1, "shm"]])
        self.retracting = deployment.add_gateway([self.tight])
        self.both = deployment.add_gateway([self.decode[2, "shm"], self.decode[1, "shm"]])
        self.both.flags += ["--routing", "round-robin"]

    def _worker(self, role: str, tp: int, *flags: str) -> Process:
        return self.deployment.add_worker(role, *OPTIONS, "--tp", str(tp), *flags)

    async def check(self) -> dict[str, int]:
        """Requests whose tokens were compared, by what was shown. Raises AssertionError."""
        sampled = [
            {"token_ids": each.prompt, "ignore_eos": True, "seed": i, **SAMPLED}
            for i, each in enumerate(self.answers)
        ]
        wanted = await ask(self.one_rank.address, sampled, SECONDS)
        counts = {"handed off": 0, "cached": 0, "sampled": 0, "retracted": 0, "resumed": 0}
        for (sizes, kind), gateway in self.pairs.items():
            what = f"{sizes[0]} to {sizes[1]} over {kind}"
            for cached in (False, True):
                said = await ask(gateway.address, self._greedy(namespace=what), SECONDS)
                same(said, self.answers, what)
                over = sum(each.stats.transport == kind for each in said)
                assert cached or over == sum(length > 32 for length in LENGTHS), (what, over)
                counts["handed off"] += over
                counts["cached"] += sum(each.usage.cached_tokens > 0 for each in said)
            requests = [{**each, "namespace": f"{what}, sampled"} for each in sampled]
            for one, other in zip(await ask(gateway.address, requests, SECONDS), wanted, strict=True):
                tokens = [[choice.token_ids for choice in each.choices] for each in (one, other)]
                assert tokens[0] == tokens[1], f"{what}, sampled"
                counts["sampled"] += 1
        said = await ask(self.retracting.address, self._greedy() * 3, SECONDS)
        same(said, self.answers * 3, "retraction")
        counts["retracted"] = sum(each.stats.retractions > 0 for each in said)
        counts["resumed"] = await self._resume()
        return counts

    def _greedy(self, **options: Any) -> list[dict[str, Any]]:
        return [greedy(each.prompt, OUTPUT, **options) for each in self.answers]

    async def _resume(self) -> int:
        victim = self.decode[2, "shm"]
        (follower,) = [each for each in psutil.Process(victim.pid).children() if each.name() == FOLLOWER]
        asked = asyncio.create_task(ask(self.both.address, self._greedy(namespace="resume") * 2, SECONDS))
        await until(lambda: victim.load().running, "requests run there")
        follower.kill()
        said = await asked
        same(said, self.answers * 2, "resume")
        await until(lambda: not victim.alive, "the worker ends", 30.0)
        return sum(each.stats.resumed > 0 for each in said)


def same(said: list[Completion], answers: list[Answer], what: str) -> None:
    for completion, answer in zip(said, answers, strict=True):
        assert completion.token_ids == answer.tokens, f"{what}: prompt of {len(answer.prompt)} tokens"


def measure(name: str, folder: Path, pairs: Sequence[Sizes], transports: Sequence[str]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        family = Family(name, folder, pairs, transports)
        with family.deployment:
            found: dict[str, Any] = asyncio.run(family.check())
    except AssertionError as error:
        found = {"wrong": str(error)}
    return {**found, "seconds": round(time.monotonic() - began)}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--families", default=",".join(ARCHITECTURES))
    parser.add_argument("--pairs", default=PAIRS, help="ranks of prefill and decode node")
    parser.add_argument("--transports", default="shm,grpc")
    args: argparse.Namespace = parser.parse_args()
    pairs = [(int(one), int(other)) for one, other in (each.split(":") for each in args.pairs.split(","))]
    Process.forked = True  # three dozen processes a family need not each import torch
    results: dict[str, Any] = {}
    for name in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(name, Path(folder), pairs, args.transports.split(","))
        print(f"{name}: {results[name]}", flush=True)
        save_results(args, {"families": results})
    return 1 if any("wrong" in each for each in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
