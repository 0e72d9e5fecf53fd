"""`baton generate` and `baton chat`: one streamed answer, and a conversation in the terminal."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import click
import grpc
from rich.console import Console
from rich.table import Table

from baton.cli.console import StreamedAnswer, collect, explain, milliseconds, size, table, write
from baton.cli.options import fail, option, options
from baton.cli.status import server_option
from baton.client import BatonError, Client, Message, Options, Session, Stream

sampling_options = options(
    option("--max-tokens", int, 256, "Output tokens at most.", "N"),
    option("--temperature", float, None, "0 is greedy.  [default: the model's, else 1]", "X"),
    option("--top-p", float, None, "Keep the likeliest tokens up to this total probability.", "X"),
    option("--top-k", int, None, "Keep the N likeliest tokens.", "N"),
    option("--seed", int, None, "The same seed gives the same text.", "N"),
    option("--stop", str, (), "End before this text; repeatable.", "TEXT", multiple=True),
)
"""Common sampling parameters; the server has the defaults."""


image_option = click.option(
    "--image",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="An image that the model sees before the text; repeatable.",
)


def read_image(path: Path) -> bytes:
    """Ends the command if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")


def _user(text: str, images: Iterable[bytes]) -> Message:
    content: list[str | bytes] = [*images]
    return {"role": "user", "content": [*content, text] if content else text}


def given_options(sampling: dict[str, Any]) -> Options:
    """The flags of `sampling_options` that were given."""
    return cast(Options, {name: value for name, value in sampling.items() if value not in (None, ())})


def stats_table(answers: list[tuple[str, StreamedAnswer]]) -> Table:
    """A row for each request: latencies, tokens, and the pages pulled, with the transport (none if the decode
    node computed the prompt)."""
    rows = table("request", "TTFT", "TPOT", "prompt", "cached", "output", "pages", "bytes", "via")
    for name, answer in answers:
        stats, usage = answer.stats, answer.usage
        rows.add_row(
            name,
            milliseconds(answer.ttft),
            milliseconds(answer.tpot),
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.output_tokens),
            str(stats.pulled_pages),
            size(stats.pulled_bytes),
            stats.transport or "-",
        )
    return rows


@click.command()
@click.argument("prompt")
@server_option
@click.option("--chat", is_flag=True, help="Send the prompt as a chat message, through the model's template.")
@image_option
@sampling_options
@click.option("--stats", is_flag=True, help="Print latencies, tokens and cache hits to stderr.")
def generate(
    prompt: str, server: str, chat: bool, image: tuple[Path, ...], stats: bool, **sampling: Any
) -> None:
    """Stream the continuation of PROMPT to stdout; '-' reads it from stdin.

    \b
    Examples:
      baton generate "textwrap.dedent(text)" --max-tokens 64
      baton generate "Hello!" --chat --temperature 0 --stats
      baton generate "What is this?" --image picture.png
      baton generate - < prompt.txt
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    question: dict[str, Any] = {"prompt": text}
    if chat or image:
        question = {"messages": [_user(text, map(read_image, image))]}
    try:
        with Client(server) as client, client.stream(**question, **given_options(sampling)) as stream:
            answer = collect(stream, show=True)
    except BatonError as error:
        fail(explain(error, server))
    write("\n")
    if stats:
        Console(stderr=True).print(stats_table([("generate", answer)]))


HELP = (
    "/image FILE shows an image with the next message, /new starts over, /quit (or Ctrl-D) leaves, "
    "Ctrl-C stops an answer."
)
PASTE_SECONDS = 0.05
"""Longest pause between the lines of a pasted text."""


@contextlib.contextmanager
def interrupt_closes(stream: Stream) -> Iterator[None]:
    """Ctrl-C cancels the answer and keeps the session unchanged; a second one is KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        stream.close()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def turn(session: Session, messages: list[Message], sampling: dict[str, Any]) -> StreamedAnswer | None:
    """Streams the answer; None if it was stopped. Raises BatonError."""
    stream = session.stream(messages=messages, **given_options(sampling))
    try:
        with interrupt_closes(stream):
            answer = collect(stream, show=True)
    except BatonError as error:
        if error.code is grpc.StatusCode.CANCELLED:
            return None
        raise
    return answer if answer.completion.stats is not None else None


def _stats(answer: StreamedAnswer) -> str:
    usage = answer.usage
    latency = f"TTFT {milliseconds(answer.ttft)}, TPOT {milliseconds(answer.tpot)}"
    prompt = f"{usage.prompt_tokens} prompt tokens of which {usage.cached_tokens} cached"
    return f"({latency}, {prompt}, {usage.output_tokens} new)"


def read_message() -> str:
    """A typed or pasted message. Lines that follow at once belong to it; an unfinished last line of a pasted
    text waits for Enter. Raises EOFError and KeyboardInterrupt."""
    lines = [input("> ")]
    while _input_pending():
        lines.append(input("| "))
    return "\n".join(lines).strip()


def _input_pending() -> bool:
    """Whether the terminal has more input, also an unfinished line."""
    if not sys.stdin.isatty():
        return False
    before = termios.tcgetattr(sys.stdin)
    unbuffered = [*before]
    unbuffered[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, unbuffered)
    try:
        return bool(select.select([sys.stdin], [], [], PASTE_SECONDS)[0])
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _talk(
    client: Client, server: str, system: str, images: list[bytes], sampling: dict[str, Any], stats: bool
) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history in input()
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    session, new = client.session(), list(opening)
    click.secho(HELP, dim=True)
    while True:
        try:
            line = read_message()
        except KeyboardInterrupt:
            write("\n")
            continue
        except EOFError:
            write("\n")
            break
        if line in ("/quit", "/exit"):
            break
        if line == "/new":
            session.close()
            session, new = client.session(), list(opening)
        elif line.startswith("/image "):
            path = Path(line.removeprefix("/image ").strip()).expanduser()
            try:
                images.append(path.read_bytes())
            except OSError as error:
                click.secho(f"cannot read {path}: {error.strerror}", fg="red")
        elif line.startswith("/"):
            click.secho(HELP, dim=True)
        elif line:
            try:
                answer = turn(session, [*new, _user(line, images)], sampling)
            except BatonError as error:
                if error.code is grpc.StatusCode.UNAVAILABLE:
                    fail(explain(error, server))
                click.secho(f"\n{explain(error, server)}", fg="red")
                continue
            if answer is None:
                click.secho("\n(stopped; this turn is not remembered)", dim=True)
                continue
            new = []
            images.clear()
            write("\n")
            if stats:
                click.secho(_stats(answer), dim=True)
    session.close()


@click.command()
@server_option
@click.option(
    "--system", default="", metavar="TEXT", help="A system message at the beginning of the conversation."
)
@image_option
@sampling_options
@click.option("--stats", is_flag=True, help="Print latencies and cached tokens after each answer.")
def chat(server: str, system: str, image: tuple[Path, ...], stats: bool, **sampling: Any) -> None:
    """Talk with the model. The KV of earlier turns is reused. Images are shown with the first message.

    \b
    Examples:
      baton chat
      baton chat --temperature 0 --stats
      baton chat --system "Answer in one sentence."
    """
    try:
        with Client(server) as client:
            client.models()  # fails at once if there is no gateway
            _talk(client, server, system, [*map(read_image, image)], sampling, stats)
    except BatonError as error:
        fail(explain(error, server))
