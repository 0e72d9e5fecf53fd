"""Many malformed messages to every public and internal port of a deployment.

    python benchmarks/fuzz.py --messages 100000 --json benchmarks/results/fuzz.json
    python benchmarks/fuzz.py --strangers --messages 100000 --json benchmarks/results/fuzz-strangers.json

Sends the corpus, then alternately messages that parse (hypothesis, from the protobuf and JSON schemas),
mutated valid bytes, and noise on plain connections (HTTP/1.1, HTTP/2 frames). After each part all processes
must still run, hold nothing, have logged no traceback, and answer a valid request with the same tokens as
before. --strangers: the deployment has a cluster secret and an API key. Valid and malformed messages are
sent with credentials that are missing, broken, or for another port. Each must be refused with the right
error, and after each part the processes must have counted nothing and logged no part of a credential.

Failures are printed, and their cases kept in --keep, from where they can be put into tests/fuzz_corpus. The
exit code is 1 if there was a failure.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import itertools
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "cluster"))

from checkpoints import make_model, save
from fuzzing import Case, Keys, Run, load, strangers, structured
from fuzzing import save as keep
from fuzzing.mutate import mutated
from fuzzing.strangers import every_door
from rich.console import Console
from rich.progress import Progress
from shared import make_parser, save_results

CORPUS = Path(__file__).parent.parent / "tests" / "fuzz_corpus"
CALLS = 1000
"""Cases of each kind in a part."""


def parts(seed: int, rng: Random, stranger: bool) -> Iterator[Iterator[Case]]:
    """The cases between two checks of the deployment: first the corpus, then new ones without end."""
    yield itertools.chain(load(CORPUS / "strangers"), every_door()) if stranger else iter(load(CORPUS))
    for number in itertools.count():
        if stranger:
            yield itertools.islice(strangers(rng), 2 * CALLS)
        else:
            yield itertools.chain(structured(CALLS, seed + number), itertools.islice(mutated(rng), CALLS))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--messages", type=int, default=10000, help="at least")
    parser.add_argument("--strangers", action="store_true", help="send calls without valid credentials")
    parser.add_argument("--seed", type=int, default=0, help="0: a random one")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for failing cases")
    args = parser.parse_args()
    seed = args.seed or secrets.randbits(32)
    console, rng = Console(), Random(seed)
    console.print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as scratch:
        model = save(make_model("qwen3"), Path(scratch) / "model")
        folder = Path(scratch)
        keys = Keys(secrets.token_hex(32), secrets.token_hex(16)) if args.strangers else None
        made = Run.closed(folder, model, keys) if keys is not None else Run.open(folder, model)
        with made as deployment, Progress(console=console) as progress:
            shown = progress.add_task("messages", total=args.messages)
            run = Run(deployment, keys)
            for cases in parts(seed, rng, args.strangers):
                run.send(cases, rng, lambda count: progress.advance(shown, count))
                if run.report.messages >= args.messages or run.report.wrong:
                    break
    report = run.report
    if report.failing:
        args.keep.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(report.failing):
        console.print(f"kept: {keep(case, args.keep, f'failing-{number}')}")
    found = {"seed": seed, "strangers": args.strangers, **report.summary()}
    console.print_json(json.dumps(found))
    save_results(args, found)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
