"""Entry point of the `baton` command. Imports a command's module only when that command is used."""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from baton import __version__
from baton.cli import surroundings

Commands = Mapping[str, Mapping[str, tuple[str, str]]]
"""Section -> command -> (module:attribute in baton.cli, short help)."""


class LazyGroup(click.Group):
    """A group that imports a command when it is used. Help lists the commands by section."""

    def __init__(self, *args: Any, lazy: Commands, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for section in self._lazy.values() for name in section]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for section in self._lazy.values():
            if cmd_name in section:
                module, attribute = section[cmd_name][0].split(":")
                command = getattr(importlib.import_module(f"baton.cli.{module}"), attribute)
                assert isinstance(command, click.Command)
                return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"{error.message}{hint}", error.ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in self._lazy.items():
            with formatter.section(title):
                formatter.write_dl([(name, short) for name, (_, short) in section.items()])


COMMANDS: Commands = {
    "Run": {
        "up": ("up:up", "Start a whole deployment on this machine and keep it running."),
        "serve": ("serve:serve", "Run one process: gateway, tokenizer, prefill, decode or encode."),
        "scale": ("scale:scale", "Change how many workers a running `baton up --ray` has."),
        "demo": ("demo:demo", "Start a deployment, stream some answers, show what happened."),
    },
    "Use": {
        "generate": ("generate:generate", "Stream the continuation of a prompt."),
        "chat": ("generate:chat", "Talk with the model."),
    },
    "Inspect": {
        "status": ("status:status", "Every process of a running deployment, with health and load."),
        "role": ("role:role", "Make a prefill node a decode node, or the other way round."),
        "top": ("top:top", "The same live: rates, processes, the latest requests."),
        "trace": ("trace:trace", "Where requests waited: their phases through all processes."),
        "probe": ("probe:probe", "One small request through a running deployment, as an exit code."),
        "health": ("health:health", "Whether one process serves; for the probes of containers."),
        "bench": ("main:bench", "A deployment or the engine: serve, offline, step, quality, profile, kv."),
        "plan": ("plan:plan", "How many prefill and decode nodes a given traffic needs."),
        "verify": ("verify:verify", "Compare split with aggregated, token for token."),
        "sim": ("sim:sim", "Run the core of all processes in simulated time, with faults, from a seed."),
        "doctor": ("doctor:doctor", "What this machine can run, and why not."),
    },
}


MEASUREMENTS: Commands = {
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
        "quality": ("bench_quality:quality", "What quantization costs: perplexity, greedy tokens that stay."),
        "profile": ("bench_profile:profile", "What steps, pulls and messages cost, for `baton plan`."),
        "kv": ("bench_kv:kv", "Rates of the transports between two processes, by prompt length."),
    }
}


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
      baton bench quality --model smollm2 --quantization int8
      baton bench profile --json profile.json               the input of `baton plan`
      baton bench kv --tokens 2048,16384                    pages between two processes

    See `baton bench MEASUREMENT --help`.
    """


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, "-V", "--version", prog_name="baton", message="%(prog)s %(version)s")
def cli() -> None:
    """Serves large language models with prefill and decode in separate processes.

    \b
    Examples:
      baton up                             the demo model, one prefill and one decode node
      baton generate "def main():"         in a second terminal
      baton up --model Qwen/Qwen3-0.6B     your own model: a path or a Hugging Face id
      baton status                         what is running, and how busy it is

    `baton COMMAND --help` has more examples.
    """


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 on success, 1 if the work failed, 2 if the arguments are wrong or it
    could not start. An error is one line on stderr."""
    # Else gRPC writes lines of its own about each failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    # Else Python's child processes, multiprocessing's among them, import modules from the current directory,
    # where in /tmp anybody may have put them.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        surroundings.check()
    except OSError as error:
        click.echo(f"baton: {error}", err=True)
        sys.exit(2)
    # A supervisor has said it; while a line is typed, nothing is said.
    if "--lifeline" not in sys.argv and "_BATON_COMPLETE" not in os.environ:
        for line in surroundings.unknown_variables():
            click.echo(f"baton: {line}", err=True)
    try:
        result: Any = cli.main(args=arguments, prog_name="baton", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        hint = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        click.echo(f"baton: {error.format_message()}{hint}", err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"baton: {error.format_message()}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter tries to write again at its end
        click.echo(f"baton: cannot write {error.filename or 'the output'}: {error.strerror}", err=True)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
