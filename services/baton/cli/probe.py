"""`baton probe`: one request through a running deployment, as an exit code."""

from __future__ import annotations

import asyncio
import random
import secrets

import click

from baton.cli.console import explain, milliseconds
from baton.cli.node_reports import ask_deployment
from baton.cli.options import fail, option
from baton.cli.status import server_option
from baton.client import BatonError, Client, Completion

PROMPT_TOKENS = 160


def send_probe(server: str, seconds: float) -> Completion:
    """Two tokens for a new random prompt. Raises BatonError."""
    with Client(server) as client:
        model = client.models()[0]
        length = min(PROMPT_TOKENS, model.context_length - 2)
        tokens = [random.randrange(model.vocab_size) for _ in range(length)]
        name = f"baton-probe-{secrets.token_hex(8)}"
        return client.generate(
            token_ids=tokens,
            max_tokens=2,
            temperature=0.0,
            ignore_eos=True,
            timeout=seconds,
            namespace=name,
            hand_off=True,
        )


@click.command()
@server_option
@option("--timeout seconds", click.FloatRange(min=0.1), 10.0, "Time limit of the answer.", "SECONDS")
def probe(server: str, seconds: float) -> None:
    """Send a small request through a running deployment, with a hand-off; exit with 0 if it succeeded.

    The prompt is random and has a prefix-cache namespace of its own, so that it is computed and its pages
    are pulled. Exits with 1 if no answer comes in time, or if there are prefill nodes and none was used. A
    gateway with --probe-every does this by itself.

    \b
    Examples:
      baton probe
      baton probe --server 10.0.0.5:50050 --timeout 2
    """
    try:
        answer = send_probe(server, seconds)
    except BatonError as error:
        fail(explain(error, server))
    stats = answer.stats
    assert stats is not None
    if not stats.pulled_pages and any(node.role == "prefill" for node in asyncio.run(ask_deployment(server))):
        fail(f"the prompt was not handed off: {stats.decode_address} computed it ('baton status' says why)")
    prefill = f"prefill {stats.prefill_address} > " if stats.prefill_address else ""
    pages = f", {stats.pulled_pages} pages by {stats.transport}" if stats.pulled_pages else ""
    times = f"first token {milliseconds(stats.ttft)}, end {milliseconds(stats.total)}"
    click.echo(f"ok: {prefill}decode {stats.decode_address}{pages}; {times}")
