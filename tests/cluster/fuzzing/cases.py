"""A case: one call, and what is sent on it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from baton.v1 import (
    cache_pb2,
    decode_pb2,
    embed_pb2,
    inference_pb2,
    node_pb2,
    prefill_pb2,
    tokenizer_pb2,
    trace_pb2,
)

HELLO = b"<hello>"
"""Stands for the stream's valid first message, which depends on the deployment."""


EVERYWHERE = ("gateway", "tokenizer", "prefill", "decode")


@dataclass(frozen=True)
class Method:
    """A gRPC method. `roles`: the processes that serve it. `path`: of Baton's own without the package."""

    roles: tuple[str, ...]
    path: str
    request: type[Message]
    stream: bool = False
    hello: bool = False
    """Its stream begins with a hello."""
    ends_at_malformed: bool = True
    endless: bool = False
    """Its answers end when the caller leaves, and not before."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Its names in cases: the path, and where several processes serve it the role as well."""
        return (self.path,) if len(self.roles) == 1 else tuple(f"{self.path} {role}" for role in self.roles)

    @property
    def wire(self) -> str:
        return f"/{self.path}" if "." in self.path else f"/baton.v1.{self.path}"


METHODS = (
    Method(("gateway",), "Inference/Generate", inference_pb2.GenerateRequest, True, ends_at_malformed=False),
    Method(("gateway",), "Inference/Complete", inference_pb2.CompleteRequest),
    Method(("gateway",), "Inference/Stream", inference_pb2.StreamRequest),
    Method(("gateway",), "Inference/Embed", inference_pb2.EmbedRequest),
    Method(("gateway",), "Inference/ListModels", inference_pb2.ListModelsRequest),
    Method(("tokenizer",), "Tokenizer/Encode", tokenizer_pb2.EncodeRequest),
    Method(("tokenizer",), "Tokenizer/Decode", tokenizer_pb2.DecodeRequest),
    Method(("tokenizer",), "Tokenizer/Detokenize", tokenizer_pb2.DetokenizeRequest, True),
    Method(("tokenizer",), "Tokenizer/Vocabulary", tokenizer_pb2.VocabularyRequest),
    Method(("decode",), "Decode/Generate", decode_pb2.GenerateCommand, True, hello=True),
    Method(("prefill",), "Prefill/Run", prefill_pb2.PrefillRequest, True, hello=True),
    Method(("decode",), "Decode/Embed", embed_pb2.EmbedPrompts),
    Method(("decode",), "Decode/TakeLog", decode_pb2.TakeLogRequest),
    Method(("prefill",), "Prefill/Embed", embed_pb2.EmbedPrompts),
    Method(("prefill", "decode"), "PageSource/Fetch", prefill_pb2.FetchRequest, True),
    Method(("prefill", "decode"), "Cache/Lend", prefill_pb2.PrefillRequest, True, hello=True),
    Method(("prefill", "decode"), "Cache/Watch", cache_pb2.WatchRequest, endless=True),
    Method(EVERYWHERE, "Node/GetInfo", node_pb2.GetInfoRequest),
    Method(EVERYWHERE, "Node/GetLoad", node_pb2.GetLoadRequest),
    Method(EVERYWHERE, "Node/Watch", node_pb2.WatchNodeRequest, endless=True),
    Method(EVERYWHERE, "Node/Recent", trace_pb2.RecentRequest),
    Method(("gateway",), "Traces/GetTraces", trace_pb2.GetTracesRequest),
)
REFLECTION = tuple(
    Method(
        EVERYWHERE,
        f"grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest,
        True,
    )
    for version in ("v1", "v1alpha")
)
HEALTH = (
    Method(EVERYWHERE, "grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest),
    Method(EVERYWHERE, "grpc.health.v1.Health/Watch", health_pb2.HealthCheckRequest, endless=True),
)
"""Open to everybody."""
CHANGES = (
    Method(EVERYWHERE, "Node/Drain", node_pb2.DrainRequest),
    Method(EVERYWHERE, "Node/SetRole", node_pb2.SetRoleRequest),
)
"""Sent by strangers alone: for a friend they do what their names say."""
FOR_FRIENDS = (*METHODS, *REFLECTION, *HEALTH)
FOR_STRANGERS = (*METHODS, *REFLECTION, *CHANGES)
TARGETS = {
    target: (method, role)
    for method in (*FOR_FRIENDS, *CHANGES)
    for target, role in zip(method.targets, method.roles, strict=True)
}

HTTP = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v1/responses",
    "/v1/messages",
)
RAW = ("http", "gateway", "tokenizer", "decode", "prefill")
"""Bytes on a bare connection: to the HTTP port, or to the gRPC port of that process."""


@dataclass(frozen=True)
class Case:
    """target: one of TARGETS, an HTTP path, "raw NAME", or for strangers an HTTP verb and path. messages: in
    order; one for HTTP and unary calls. way: of strangers, the name of what they show (see `credentials`)."""

    target: str
    messages: tuple[bytes, ...]
    way: str = ""

    @property
    def place(self) -> str:
        """The target without an HTTP verb."""
        return self.target.rpartition(" ")[2] if "/" in self.target.rpartition(" ")[2] else self.target

    def played(self) -> Case:
        """Without what comes after the message that ends the stream, so that what is counted has been read;
        and without what would make a node connect to strangers."""
        if self.way or self.target not in TARGETS:
            return self
        method, _ = TARGETS[self.target]
        kept: list[bytes] = []
        for data in self.messages:
            parsed = parse(method, data) if data != HELLO else None
            if isinstance(parsed, decode_pb2.GenerateCommand) and not _harmless(parsed.start.prefill):
                continue
            if isinstance(parsed, decode_pb2.GenerateCommand | prefill_pb2.PrefillRequest) and not _harmless(
                source.address for source in parsed.start.sources
            ):
                continue
            kept.append(data)
            if data != HELLO and parsed is None and method.ends_at_malformed:
                break
        return Case(self.target, tuple(kept))


def parse(method: Method, data: bytes) -> Message | None:
    try:
        return method.request.FromString(data)
    except DecodeError:
        return None


NOWHERE = ("127.0.0.1:1", "", "nonsense", ":", "127.0.0.1:99999")


def _harmless(addresses: Iterable[str]) -> bool:
    return all(address in NOWHERE for address in addresses)


def save(case: Case, folder: Path, name: str) -> Path:
    path = folder / f"{re.sub('[^A-Za-z0-9]+', '.', case.target).strip('.')}-{name}.txt"
    shown = [f"as {case.way}"] if case.way else []
    messages = ("hello" if data == HELLO else f"= {data.hex()}" for data in case.messages)
    path.write_text("\n".join([case.target, *shown, *messages]) + "\n")
    return path


def load(folder: Path) -> list[Case]:
    """All cases of a folder. A file: the target; of a stranger `as WAY`; then a line a message, `= ` and
    hexadecimal, `hello`, or `"` and plain text. Lines that begin with # are comments."""
    return [_read(path) for path in sorted(folder.glob("*.txt"))]


def _read(path: Path) -> Case:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    messages, way = [], ""
    for line in lines[1:]:
        if line == "hello":
            messages.append(HELLO)
        elif line.startswith("as "):
            way = line[3:]
        elif line.startswith("= "):
            messages.append(bytes.fromhex(line[2:]))
        elif line.startswith('"'):
            messages.append(line[1:].encode())
        else:
            raise ValueError(f"{path}: {line[:40]!r} is neither hello, hexadecimal, text, nor as what")
    return Case(lines[0], tuple(messages), way)
