"""The option parser and the result file of all benchmarks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from baton.bench.machine import machine, versions


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """With the options --json and --commit, which `save_results` takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--commit", default="", help="noted in the results; default: the checkout's")
    return parser


def save_results(args: argparse.Namespace, results: dict[str, Any]) -> None:
    """Writes the results with the machine and the versions, if a file was named."""
    if args.json is None:
        return
    args.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": machine(), "versions": versions(args.commit)}
    args.json.write_text(json.dumps(about | results, indent=2) + "\n")
