"""A case: one call, and what is sent on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError, Message

from baton.v1 import decode_pb2, inference_pb2, node_pb2, prefill_pb2, tokenizer_pb2

HELLO = b"<hello>"
"""Stands for the stream's valid first message, which depends on the deployment."""


@dataclass(frozen=True)
class Method:
    """A gRPC method. `role`: the process that serves it."""

    role: str
    path: str
    request: type[Message]
    stream: bool = False
    hello: bool = False
    """Its stream begins with a hello."""
    ends_at_malformed: bool = True


METHODS = {
    method.path: method
    for method in (
        Method("gateway", "Inference/Generate", inference_pb2.GenerateRequest, True, ends_at_malformed=False),
        Method("gateway", "Inference/ListModels", inference_pb2.ListModelsRequest),
        Method("tokenizer", "Tokenizer/Encode", tokenizer_pb2.EncodeRequest),
        Method("tokenizer", "Tokenizer/Decode", tokenizer_pb2.DecodeRequest),
        Method("tokenizer", "Tokenizer/Detokenize", tokenizer_pb2.DetokenizeRequest, True),
        Method("decode", "Decode/Generate", decode_pb2.GenerateCommand, True, hello=True),
        Method("prefill", "Prefill/Run", prefill_pb2.PrefillRequest, True, hello=True),
        Method("prefill", "PageSource/Fetch", prefill_pb2.FetchRequest, True),
        Method("gateway", "Node/GetInfo", node_pb2.GetInfoRequest),
        Method("decode", "Node/GetLoad", node_pb2.GetLoadRequest),
    )
}
"""All but Node/Drain: whatever it is asked, it does what its name says, and there is no way back."""

HTTP = ("/v1/completions", "/v1/chat/completions")
RAW = ("http", "gateway", "tokenizer", "decode", "prefill")
"""Bytes on a bare connection: to the HTTP port, or to the gRPC port of that process."""


@dataclass(frozen=True)
class Case:
    """target: a method's path, an HTTP path, or "raw NAME". messages: in order; one for HTTP and unary
    calls."""

    target: str
    messages: tuple[bytes, ...]

    def played(self) -> Case:
        """Without what comes after the message that ends the stream, so that what is counted has been read;
        and without what would make a decode node connect to strangers."""
        method = METHODS.get(self.target)
        if method is None:
            return self
        kept: list[bytes] = []
        for data in self.messages:
            parsed = parse(method, data) if data != HELLO else None
            if isinstance(parsed, decode_pb2.GenerateCommand) and not _harmless(parsed.start.prefill):
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
    path = folder / f"{case.target.strip('/').replace('/', '.').replace(' ', '.')}-{name}.txt"
    lines = [case.target, *("hello" if data == HELLO else f"= {data.hex()}" for data in case.messages)]
    path.write_text("\n".join(lines) + "\n")
    return path


def load(folder: Path) -> list[Case]:
    """All cases of a folder. A file: the target; then a line a message, `= ` and hexadecimal, `hello`, or `"`
    and plain text. Lines that begin with # are comments."""
    return [_read(path) for path in sorted(folder.glob("*.txt"))]


def _read(path: Path) -> Case:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    messages = []
    for line in lines[1:]:
        if line == "hello":
            messages.append(HELLO)
        elif line.startswith("= "):
            messages.append(bytes.fromhex(line[2:]))
        elif line.startswith('"'):
            messages.append(line[1:].encode())
        else:
            raise ValueError(f"{path}: {line[:40]!r} is neither hello, hexadecimal nor text")
    return Case(lines[0], tuple(messages))
