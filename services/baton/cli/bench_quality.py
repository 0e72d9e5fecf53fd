"""`baton bench quality`: what a quantized model loses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.cli.bench_options import Report, engine_config, report_options, run_here
from baton.cli.console import progress_bar, shown, table
from baton.cli.options import (
    COUNT,
    PROCESS,
    SectionedCommand,
    config_options,
    option,
    options,
    take,
)
from baton.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """The command's options."""

    windows: int
    text: Path | None


def _quality(config: WorkerConfig, asked: QualityOptions, output: Report, console: Console) -> None:
    with console.status("Loading torch"):
        from baton.bench.quality import python_documentation, score, windows
        from baton.model_path import resolve
        from baton.models.weight_plan import describe
        from baton.rpc.logs import configure

        configure("bench", "warning")
    report = output.begin("quality")
    path = resolve(config.model)
    text = python_documentation() if asked.text is None else asked.text.read_text()
    texts = windows(path, text, asked.windows)
    plain = replace(config, quantization="none", quantize_head=False, kv_dtype="auto")
    kv = "" if config.kv_dtype == "auto" else f", KV {config.kv_dtype}"
    name = f"{config.quantization}{kv}"
    ways = [("reference", plain), (name, config)]
    scores = []
    with progress_bar(console) as progress:
        for name, each in ways:
            bar = progress.add_task(name, total=len(texts))
            scores.append(score(each, texts, lambda bar=bar: progress.advance(bar)))  # type: ignore[misc]
    reference, scored = scores
    change, error = scored.change(reference)
    report |= {
        "model": config.model,
        "quantization": config.quantization,
        "quantize_head": config.quantize_head,
        "kv_dtype": config.kv_dtype,
        "tokens": len(scored.greedy),
        "perplexity": scored.perplexity,
        "reference_perplexity": reference.perplexity,
        "perplexity_change": change,
        "perplexity_change_error": None if math.isnan(error) else error,
        "greedy_kept": scored.kept(reference),
    }
    how = describe(path, _device(config), config.quantization) or "nothing is quantized"
    source = "Python's language reference" if asked.text is None else str(asked.text)
    console.print(f"{config.model}: {how}; {len(scored.greedy):,} tokens of {source}", highlight=False)
    rows = table("weights", "perplexity", "change", "greedy tokens kept")
    rows.add_row("dequantized", shown(reference.perplexity, 3), "", "")
    spread = "" if math.isnan(error) else f" ± {error:.2%}"  # of one window there is none
    kept = f"{scored.kept(reference):.2%}"
    rows.add_row(name, shown(scored.perplexity, 3), f"{change:+.2%}{spread}", kept)
    console.print(rows)
    output.save(report)


def _device(config: WorkerConfig) -> Any:
    import torch

    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(automatic if config.device == "auto" else config.device)


@click.command(cls=SectionedCommand)
@options(
    option("--windows", COUNT, 16, "Runs of 256 tokens of the text, evenly spaced."),
    option(
        "--text",
        click.Path(exists=True, dir_okay=False, path_type=Path),
        None,
        "Text to measure with; by default Python's language reference, which comes with the interpreter.",
        "FILE",
    ),
    report_options,
    config_options(WorkerConfig, leave_out=PROCESS | {"step_cost"}),
)
def quality(**values: Any) -> None:
    """Measure what quantization costs: perplexity of a text, and the share of greedy tokens that stay.

    The model is loaded twice: with all weights dequantized (--quantization none) and the KV pool in the
    model's dtype, and as the options say.
    Runs in this process. Behind ± is the standard error of the change; more --windows make it smaller. The
    share is that of the positions in the text at which both find the same token likeliest.

    \b
    Examples:
      baton bench quality --model smollm2 --quantization int8
      baton bench quality --model smollm2 --kv-dtype fp8_e4m3
      baton bench quality --model ./my-awq-model --text sample.txt
    """
    output, asked = take(Report, values), take(QualityOptions, values)
    output.check_writable()
    console = Console()
    config = engine_config(values)
    run_here(lambda: _quality(config, asked, output, console))
