"""The token streams of one Detokenize call."""

from __future__ import annotations

from collections import OrderedDict

from baton.rpc.errors import BatonError, exhausted, invalid, not_found, to_status
from baton.rpc.validate import check_token_ids
from baton.tokenizer.detokenize import Detokenizer
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import node_pb2, tokenizer_pb2

MAX_STREAMS = 65536
"""Open token streams on one call, and closed ones that are remembered."""


class TokenStreams:
    """Applies messages in order; used by one thread at a time. `counts` is its own share of the load."""

    def __init__(self, vocabulary: Vocabulary, max_streams: int = MAX_STREAMS) -> None:
        self.counts = node_pb2.Load()
        self._vocabulary = vocabulary
        self._max_streams = max_streams
        self._open: dict[int, Detokenizer] = {}
        self._closed: OrderedDict[int, None] = OrderedDict()

    def apply(self, request: tokenizer_pb2.DetokenizeRequest) -> tokenizer_pb2.DetokenizeResponse:
        """One output for each item, in order; each fails by itself."""
        response = tokenizer_pb2.DetokenizeResponse()
        for index, item in enumerate(request.items):
            output = response.outputs.add(id=item.id)
            try:
                self._apply(item, output, f"items[{index}]")
            except BatonError as error:
                self.counts.failed += item.id in self._open
                self._drop(item.id)
                output.Clear()
                output.id = item.id
                output.finished = True
                output.error.CopyFrom(to_status(error))
        return response

    def close(self) -> None:
        """Drops every open stream."""
        self.counts.cancelled += len(self._open)
        self.counts.requests -= len(self._open)
        self._open.clear()

    def _apply(
        self, item: tokenizer_pb2.DetokenizeItem, output: tokenizer_pb2.DetokenizeOutput, field: str
    ) -> None:
        size = self._vocabulary.vocab_size
        check_token_ids(item.context, size, f"{field}.context")
        check_token_ids(item.token_ids, size, f"{field}.token_ids")
        check_token_ids(item.token_bytes_of, size, f"{field}.token_bytes_of")
        stream = self._open.get(item.id)
        if stream is None:
            stream = self._open_stream(item)
        elif item.context or item.HasField("skip_special_tokens"):
            name = "context" if item.context else "skip_special_tokens"
            raise invalid(f"{field}.{name}", f"{field}.{name}: only in the item that opens a token stream")
        text = stream.feed(item.token_ids)
        self.counts.output_tokens += len(item.token_ids)
        if item.finish:
            text += stream.finish()
            self.counts.finished += 1
            self._drop(item.id)
        output.text = text
        output.finished = item.finish
        output.token_bytes.extend(self._vocabulary.pieces.own(token) for token in item.token_bytes_of)

    def _open_stream(self, item: tokenizer_pb2.DetokenizeItem) -> Detokenizer:
        if item.id in self._closed:
            raise not_found(f"token stream {item.id} is closed; ids are unique on a call", "STREAM_CLOSED")
        if len(self._open) >= self._max_streams:
            raise exhausted(
                f"{self._max_streams} token streams are open on this call; finish some", "STREAMS"
            )
        skip = item.skip_special_tokens if item.HasField("skip_special_tokens") else True
        stream = self._open[item.id] = Detokenizer(self._vocabulary.pieces, item.context, skip)
        self.counts.requests += 1
        return stream

    def _drop(self, name: int) -> None:
        """Forgets the stream, but remembers for a while that it was: a late item must not open it anew."""
        if self._open.pop(name, None) is not None:
            self.counts.requests -= 1
        self._closed[name] = None
        if len(self._closed) > self._max_streams:
            self._closed.popitem(last=False)


def size(item: tokenizer_pb2.DetokenizeItem) -> int:
    return len(item.token_ids) + len(item.context) + len(item.token_bytes_of)
