"""`baton serve ROLE`: one process in the foreground. Containers and the supervisor run this."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from typing import Any

import click

from baton.cli.config_fields import ROLES, build
from baton.cli.options import SectionedCommand, config_file_option, config_options
from baton.config import NodeConfig, WorkerConfig

GRACE_SECONDS = 5.0
"""From SIGTERM, at the supervisor's end, to SIGKILL. SIGTERM lets the process remove its shared memory."""


def hold_lifeline(grace_seconds: float = GRACE_SECONDS) -> None:
    """Ends this process when its standard input ends. Returns at once."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


MODULES = {
    "gateway": "baton.api.server",
    "tokenizer": "baton.tokenizer.server",
    "prefill": "baton.worker.process",
    "decode": "baton.worker.process",
    "encode": "baton.worker.encode.server",
}
DEFAULT_PORTS = {
    "gateway": (50050, 8000),
    "tokenizer": (50051, 51051),
    "prefill": (50061, 51061),
    "decode": (50071, 51071),
    "encode": (50081, 51081),
}
"""Role -> gRPC port, HTTP port."""

ABOUT = {
    "gateway": """Serves clients: baton.v1.Inference over gRPC, OpenAI's and Anthropic's APIs over HTTP.

    \b
    Example, with all processes on one machine:
      baton serve tokenizer --model demo
      baton serve prefill   --model demo
      baton serve decode    --model demo --prefill 127.0.0.1:50061
      baton serve gateway --decode 127.0.0.1:50071 --prefill 127.0.0.1:50061""",
    "tokenizer": """Turns text into token ids and back, and applies the chat template.

    \b
    Example:
      baton serve tokenizer --model ./my-model --port 50051""",
    "prefill": """Computes prompts and keeps their KV pages until a decode node has pulled them.

    \b
    Example:
      baton serve prefill --model ./my-model --kv-tokens 131072""",
    "decode": """Generates tokens; pulls prompts' KV pages from prefill nodes.

    \b
    Example:
      baton serve decode --model ./my-model --prefill 127.0.0.1:50061""",
    "encode": """Makes embeddings of images, for models that see; those who compute prompts pull them.

    \b
    Example:
      baton serve encode --model ./my-model""",
}


class Roles(click.Group):
    """An unknown role's error says how a whole deployment is started: other servers' `serve` takes a
    model."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            roles = ", ".join(ROLES)
            ctx.fail(f"no role {cmd_name!r} ({roles}); `baton up --model MODEL` starts all of them")
        return found


@click.group(cls=Roles)
def serve() -> None:
    """Run one process in the foreground.

    \b
    Every flag is also an environment variable and a key of a TOML file (--config):
      --kv-tokens 65536     BATON_KV_TOKENS=65536     kv_tokens = 65536
    A flag overrides the environment, which overrides the file. In the file, keys at the top are for all
    processes, keys under [gateway], [tokenizer], [prefill], [decode] or [encode] for one.

    A process that is ready prints one line to stdout. Its log goes to stderr. SIGTERM drains and ends it.
    """


def of_other_role(role: str, config_file: Any) -> NodeConfig:
    """What environment and file say of the role that the worker may be given later."""
    other = "prefill" if role == "decode" else "decode"
    command, arguments = serve.commands[other], ["--config", str(config_file)] if config_file else []
    context = command.make_context(other, arguments)
    return build(ROLES[other], context.params, {})


def _add(role: str) -> None:
    config = ROLES[role]
    port, http_port = DEFAULT_PORTS[role]
    defaults = {"port": port, "http_port": http_port}

    @serve.command(
        role,
        cls=SectionedCommand,
        help=ABOUT[role],
        short_help=ABOUT[role].split("\n")[0],
        epilog="Every flag is also an environment variable (--kv-tokens: BATON_KV_TOKENS) and a key of the "
        "--config file (kv_tokens).",
    )
    @config_file_option(role)
    @config_options(config, defaults=defaults)
    @click.option("--lifeline", is_flag=True, hidden=True, help="End when stdin ends (a supervisor's pipe).")
    def run(config_file: Any, lifeline: bool, **values: Any) -> None:
        if lifeline:
            hold_lifeline()
        settings = build(config, values, defaults)
        if isinstance(settings, WorkerConfig) and settings.node_rank:
            from baton.worker.ranks.hosts import serve_host

            sys.exit(serve_host(settings, role))
        process = importlib.import_module(MODULES[role])
        from baton.rpc.node import run_process

        if isinstance(settings, WorkerConfig):
            sys.exit(run_process(process.serve(settings, of_other_role(role, config_file))))
        sys.exit(run_process(process.serve(settings)))


for _role in ROLES:
    _add(_role)
