"""How many answers differ when their prompts come from the cache instead of being computed.

    python benchmarks/cached_identity.py --shapes 8b qwen3.5-9b
    python benchmarks/cached_identity.py --shapes qwen3.5-9b --batch-invariant

An engine in this process, random weights, greedy: the same prompts twice, the second time from the prefix
tree. Random weights have nearly equal logits, so that rounding decides far more often than with a trained
model: only shapes are compared. Prints for each shape how many streams differ, and exits with 1 if any does
under --batch-invariant.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from shared import make_parser, save_results

from baton.config import WorkerConfig
from baton.engine.sampling_params import SamplingParams
from baton.rpc.address import new_incarnation
from baton.worker.engine import build_engine

sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("tools", "tests")]

from make_shape import SHAPES, write_shape

from rig import CONTEXT, generate


def compare(shape: str, folder: Path, requests: int, output: int, options: dict[str, Any]) -> dict[str, Any]:
    write_shape(shape, folder)
    config = WorkerConfig(
        model=str(folder), load_format="dummy", context_length=CONTEXT, max_rows=requests, **options
    )
    engine = build_engine(config, new_incarnation())
    rng = random.Random(0)
    tokens = range(256, engine.model_info.vocab_size // 2)
    prompts = [rng.choices(tokens, k=rng.randrange(100, CONTEXT - output)) for _ in range(requests)]
    params = [SamplingParams(temperature=0.0, max_tokens=output)] * requests
    runs, found = [], 0
    for _ in range(2):
        found = sum(engine.cache.match_length(prompt) for prompt in prompts)
        budget = engine.config.token_budget
        runs.append(generate(engine.runner, engine.cache, prompts, params, budget=budget))
    engine.close()
    computed, cached = runs
    firsts = [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        for one, other in zip(computed, cached, strict=True)
    ]
    share = found / sum(map(len, prompts))
    about = {"shape": shape, "streams": requests, "output": output, "cached_share": share}
    return {**about, "first_differing_tokens": firsts}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["8b", "qwen3.5-9b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--kv-tokens", type=int, default=131072)
    args = parser.parse_args()
    options = {
        "device": args.device,
        "batch_invariant": args.batch_invariant,
        "kv_tokens": args.kv_tokens,
        "dtype": "bfloat16",
    }
    results = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = compare(shape, Path(folder), args.requests, args.output, options)
        results.append(found)
        different = sum(first is not None for first in found["first_differing_tokens"])
        streams = f"{different} of {args.requests} streams of {args.output} tokens differ"
        print(f"{shape}: {streams}, {found['cached_share']:.0%} of the prompts were cached", flush=True)
    save_results(args, {"options": options, "results": results})
    wrong = any(first is not None for each in results for first in each["first_differing_tokens"])
    return int(args.batch_invariant and wrong)


if __name__ == "__main__":
    raise SystemExit(main())
