"""`baton bench`: the measurements, a module each."""

from __future__ import annotations

import click

from baton.cli.main import LazyGroup

MEASUREMENTS = {
    "Measurements": {
        "serve": (
            "bench_serve:serve",
            "A deployment under load: TTFT, TPOT, ITL, goodput over request rate.",
        ),
        "offline": ("bench_offline:offline", "Many requests at once: output tokens per second."),
        "step": (
            "bench_step:step",
            "Decode steps of the engine, by batch size and context, against their floor.",
        ),
        "profile": (
            "bench_profile:profile",
            "What steps, pulls and messages cost, for `baton plan`.",
        ),
        "kv": ("bench_kv:kv", "Rates of the transports between two processes, by prompt length."),
    }
}
"""As baton.cli.main.COMMANDS."""


@click.group(cls=LazyGroup, lazy=MEASUREMENTS)
def bench() -> None:
    """Measure a deployment, or the engine alone.

    \b
    Examples:
      baton bench serve                                     start the demo model, one request a second
      baton bench serve --server 127.0.0.1:50050 --rate 8,16,24,32 --plot load.png
      baton bench serve --requests 200 --concurrency 32     closed loop
      baton bench offline --requests 32                     all at once, tokens per second
      baton bench step --batch 1,8,64 --context 128,1024    the engine without processes
      baton bench profile --json profile.json               what `baton plan` needs to know
      baton bench kv --tokens 2048,16384                    pages between two processes

    `baton bench MEASUREMENT --help` tells more.
    """
