"""`baton trace`: where requests waited."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import grpc.aio
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.text import Text

from baton.cli.chrome_trace import chrome_trace
from baton.cli.console import no_gateway
from baton.cli.credentials import Credentials, brief, reachable
from baton.cli.options import fail, option
from baton.cli.status import server_option
from baton.rpc.errors import BatonError, from_rpc_error
from baton.v1 import node_pb2, node_pb2_grpc, trace_pb2, trace_pb2_grpc

SECONDS = 10.0
LEAST_BAR = 8
MOST_BAR = 60
COLOURS = {
    "admit": "bright_black",
    "tokenize": "cyan",
    "route": "bright_black",
    "send": "bright_black",
    "queue": "yellow",
    "prefill": "blue",
    "chunk": "blue",
    "pull images": "magenta",
    "encode": "bright_blue",
    "hand-off": "magenta",
    "deliver": "bright_black",
    "pull": "magenta",
    "decode": "green",
    "resume": "red",
}
_EVENTS_WORTH_A_LINE = (
    trace_pb2.EVENT_RETRIED,
    trace_pb2.EVENT_RESUMED,
    trace_pb2.EVENT_RETRACTED,
)


async def ask_traces(
    server: str, request: trace_pb2.GetTracesRequest
) -> tuple[list[trace_pb2.Trace], list[str]]:
    """Traces of all gateways that the one at `server` knows of, each once, and the processes that did not
    answer. Raises BatonError, or AioRpcError of the gateway at `server`."""
    credentials = Credentials.to(reachable(server))
    async with credentials.gateway(reachable(server)) as channel:
        info = await node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest(), timeout=SECONDS)
        first = await _get_traces(channel, request)
    missing = list(first.missing)
    found = {trace.id: trace for trace in first.traces}

    async def ask(address: str) -> trace_pb2.GetTracesResponse:
        async with credentials.gateway(reachable(address)) as channel:
            return await _get_traces(channel, request)

    siblings = [
        peer.address for peer in info.peers if peer.role == "gateway" and peer.address != info.address
    ]
    answers = await asyncio.gather(*map(ask, siblings), return_exceptions=True)
    for address, answer in zip(siblings, answers, strict=True):
        if isinstance(answer, grpc.aio.AioRpcError):
            missing.append(f"gateway {address}: {brief(answer)}")
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found |= {trace.id: trace for trace in answer.traces}
            missing += answer.missing
    return list(found.values()), sorted(set(missing))


async def _get_traces(
    channel: grpc.aio.Channel, request: trace_pb2.GetTracesRequest
) -> trace_pb2.GetTracesResponse:
    """With those that did not fit into the first answer."""
    stub = trace_pb2_grpc.TracesStub(channel)
    answer: trace_pb2.GetTracesResponse = await stub.GetTraces(request, timeout=SECONDS)
    while answer.left_out:
        rest = trace_pb2.GetTracesRequest(ids=answer.left_out)
        more: trace_pb2.GetTracesResponse = await stub.GetTraces(rest, timeout=SECONDS)
        answer.ClearField("left_out")
        answer.traces.extend(more.traces)
        answer.missing.extend(more.missing)
        if more.traces:  # else even one does not fit
            answer.left_out.extend(more.left_out)
    return answer


def in_order(traces: Iterable[trace_pb2.Trace], request: trace_pb2.GetTracesRequest) -> list[trace_pb2.Trace]:
    """The order in which one gateway would have answered."""
    if request.ids:
        order = {id: index for index, id in enumerate(request.ids)}
        return sorted(traces, key=lambda trace: order.get(trace.id, 0))
    key = "total_us" if request.slowest else "received_unix_ms"
    return sorted(traces, key=lambda trace: -getattr(trace, key))[: request.limit]


def duration(us: int) -> str:
    """ "12.3 ms", "1.234 s"."""
    return f"{us / 1e6:.3f} s" if us >= 1_000_000 else f"{us / 1e3:.1f} ms"


def title(trace: trace_pb2.Trace) -> str:
    outcome = trace.outcome or "runs"
    if trace.reason:
        outcome += f" ({trace.reason})"
    first = f"first token {duration(trace.ttft_us)}, " if trace.HasField("ttft_us") else ""
    tokens = f"{trace.prompt_tokens} > {trace.output_tokens} tokens"
    return f"{outcome}, {first}{'end' if trace.outcome else 'so far'} {duration(trace.total_us)}, {tokens}"


def lines(trace: trace_pb2.Trace, width: int) -> list[Text]:
    """The timeline, at most `width` columns: phases, then work, each with its bar on the common scale."""
    names = _names(trace)
    processes = ", ".join(f"{role} {address}" for role, address in names if address)
    found = [Text.assemble((trace.id, "bold")), Text(title(trace)), Text(processes, style="dim")]
    detail = max((len(phase.detail) for phase in (*trace.phases, *trace.work)), default=0)
    who = max(map(len, names.values()), default=0)
    bar = max(LEAST_BAR, min(MOST_BAR, width - 33 - who - min(detail, 28)))
    for phase in trace.phases:
        found.append(_line(trace, phase, bar, names, who))
    if trace.work:
        found.append(Text("work", style="dim"))
    for phase in trace.work:
        found.append(_line(trace, phase, bar, names, who))
    for event in trace.events:
        if event.event.kind in _EVENTS_WORTH_A_LINE:
            what = trace_pb2.EventKind.Name(event.event.kind).removeprefix("EVENT_").lower()
            text = f"{duration(max(0, event.at_us)):>9} {event.role} {event.address} {what}"
            found.append(Text(f"{text} {event.event.text}".rstrip(), style="red"))
    for line in found:
        line.truncate(width, overflow="ellipsis")
        line.rstrip()
    return found


def _names(trace: trace_pb2.Trace) -> dict[tuple[str, str], str]:
    """Role and address of each process -> its name in a line: the role, if no other one has it."""
    processes = dict.fromkeys((phase.role, phase.address) for phase in (*trace.phases, *trace.work))
    roles = [role for role, _ in processes]
    return {
        (role, address): role if roles.count(role) == 1 else f"{role} {address}"
        for role, address in processes
    }


def _line(
    trace: trace_pb2.Trace, phase: trace_pb2.TracePhase, bar: int, names: dict[tuple[str, str], str], who: int
) -> Text:
    end = phase.end_us if phase.HasField("end_us") else max(trace.total_us, phase.start_us)
    scale = max(1, trace.total_us, *(each.end_us for each in trace.work))
    first = min(bar - 1, phase.start_us * bar // scale)
    last = min(bar, max(first + 1, -(-end * bar // scale)))
    colour = COLOURS.get(phase.name, "white")
    more = " " if phase.HasField("end_us") else "…"
    return Text.assemble(
        (f"{duration(phase.start_us):>9} ", "dim"),
        f"{duration(end - phase.start_us):>9} ",
        (f"{phase.name:<8} ", colour),
        (" " * first + "█" * (last - first) + more + " " * (bar - last), colour),
        (f" {names[phase.role, phase.address]:<{who}} ", "dim"),
        (phase.detail, "dim"),
    )


def write_chrome(path: Path, traces: Sequence[trace_pb2.Trace]) -> None:
    try:
        path.write_text(json.dumps(chrome_trace(traces)))
    except OSError as error:
        fail(f"cannot write {path}: {error.strerror}")


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@server_option
@option("--slowest", click.IntRange(1, 256), None, "So many of the recent requests that took longest.", "N")
@option("--last", click.IntRange(1, 256), None, "So many of the latest requests.  [default: 1]", "N")
@option(
    "--chrome",
    click.Path(dir_okay=False, path_type=Path),
    None,
    "Write Chrome's trace format into this file; https://ui.perfetto.dev opens it.",
    "FILE",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON array on stdout, with all events.")
def trace(
    ids: tuple[str, ...],
    server: str,
    slowest: int | None,
    last: int | None,
    chrome: Path | None,
    as_json: bool,
) -> None:
    """Show where requests waited: their phases through all processes, also while they run.

    ID is the gateway's name of a request, as in its log, in Accepted.request_id and in the header
    x-request-id. docs/operations.md says what each phase is.

    \b
    Examples:
      baton trace                          the latest request
      baton trace 0f3c9a1b2d4e5f60-17
      baton trace --slowest 5
      baton trace --last 200 --chrome trace.json
    """
    if sum(1 for each in (ids, slowest, last) if each) > 1:
        raise click.UsageError("give ids, --slowest or --last, not several of them")
    request = trace_pb2.GetTracesRequest(ids=ids, limit=slowest or last or 1, slowest=slowest is not None)
    try:
        found, missing = asyncio.run(ask_traces(server, request))
    except BatonError as error:
        fail(error.message, code=2)
    except grpc.aio.AioRpcError as error:
        refused = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        fail(no_gateway(server, brief(error)) if refused else from_rpc_error(error).message)
    found = in_order(found, request)
    if as_json:
        click.echo(json.dumps([MessageToDict(each, preserving_proto_field_name=True) for each in found]))
    elif chrome is not None:
        write_chrome(chrome, found)
        click.echo(f"{len(found)} requests written to {chrome}; open it in https://ui.perfetto.dev")
    else:
        console = Console(highlight=False)
        for number, each in enumerate(found):
            if number:
                console.print()
            for line in lines(each, console.width):
                console.print(line, no_wrap=True, overflow="crop", soft_wrap=False)
    for who in missing:
        click.echo(f"did not answer: {who}", err=True)
    unknown = set(ids) - {each.id for each in found}
    if unknown:
        fail(f"not remembered by this gateway: {', '.join(sorted(unknown))} (--recorder-events keeps more)")
    if not found:
        fail("the gateway remembers no request yet; send one: baton generate 'def main():'")
