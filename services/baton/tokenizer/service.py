"""Answers the calls of baton.v1.Tokenizer."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc.aio

from baton.rpc.errors import (
    BatonError,
    deadline_exceeded,
    exhausted,
    failed_precondition,
    invalid_field,
    not_found,
    to_status,
    unavailable,
)
from baton.rpc.message_size import MAX_ANSWER_BYTES, check_answer, cut
from baton.rpc.outbox import byte_size
from baton.rpc.validate import check_token_ids
from baton.tokenizer.chat_encoder import Rendered
from baton.tokenizer.conversation import read
from baton.tokenizer.detokenize import Detokenizer, decode
from baton.tokenizer.hf_tokenizer import EncodingFailed, HFTokenizer, NoChatTemplate, TemplateFailed
from baton.tokenizer.vocabulary import Vocabulary
from baton.tracing.recorder import EventKind, Recorder
from baton.v1 import node_pb2, tokenizer_pb2, tokenizer_pb2_grpc

INLINE_TOKENS = 2048
"""A message of at most this many tokens is detokenized on the event loop, which takes less than handing it
to a thread (about 0.2 microseconds per token and 5 per item)."""
WORK_SECONDS = 60.0
"""Longest time of a piece of work in a thread."""
MAX_STREAMS = 65536
"""Open token streams on one call of Detokenize, and closed ones that are remembered."""
MAX_WORK = 512
"""Most pieces of work that wait or run; more are refused."""

ENTRY_BYTES = 8
"""Bytes that a text or a result adds to its message beside itself."""

T = TypeVar("T")


class TokenizerService(tokenizer_pb2_grpc.TokenizerServicer):
    """`tokenizer` is set once it is loaded; until then no call arrives (run_node sees to it)."""

    def __init__(self, threads: ThreadPoolExecutor, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(0)
        self.tokenizer: HFTokenizer | None = None
        self.draining = False
        self._counts = node_pb2.Load()
        self._streams: set[TokenStreams] = set()
        self._threads = threads
        self._calls: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._working = 0

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.EncodeResponse:
        tokenizer = self._loaded()
        for each in request.inputs:
            if each.traceparent:
                name = (each.request.gateway, each.request.request)
                self._recorder.begin_span(*name, operation="tokenize", traceparent=each.traceparent)
        self._record(EventKind.RECEIVED, request)

        def work() -> list[tokenizer_pb2.EncodeResult]:
            self._record(EventKind.TOKENIZING, request)
            results = encode_all(tokenizer, request.inputs)
            self._record(EventKind.TOKENIZED, request, results)
            most = request.max_answer_bytes if request.HasField("max_answer_bytes") else MAX_ANSWER_BYTES
            size = sum(byte_size(result) + ENTRY_BYTES for result in results)
            check_answer(size, "inputs", "send fewer at a time, or set max_answer_bytes", most)
            return results

        try:
            with self._counted():
                results = await self._work(work)
        except BaseException as error:  # a span that was begun must end
            self._record(EventKind.ENDED, request, text=_outcome(error))
            raise
        failed = sum(result.HasField("error") for result in results)
        self._counts.failed += failed
        self._counts.finished += len(results) - failed
        self._counts.prompt_tokens += sum(len(result.token_ids) for result in results)
        return tokenizer_pb2.EncodeResponse(results=results)

    def _record(
        self,
        kind: EventKind,
        request: tokenizer_pb2.EncodeRequest,
        results: Sequence[tokenizer_pb2.EncodeResult] = (),
        text: str = "",
    ) -> None:
        """May be called in a thread."""
        for index, each in enumerate(request.inputs):
            if each.HasField("request"):
                number = len(results[index].token_ids) if results else 0
                self._recorder.add(kind, each.request.gateway, each.request.request, number=number, text=text)

    async def Decode(
        self, request: tokenizer_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> tokenizer_pb2.DecodeResponse:
        vocabulary = self._loaded().vocabulary
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def work() -> list[str]:
            for index, sequence in enumerate(request.sequences):
                check_token_ids(sequence.token_ids, vocabulary.size, f"sequences[{index}].token_ids")
            texts: list[str] = []
            size = 0
            for sequence in request.sequences:
                texts.append(decode(vocabulary, sequence.token_ids, skip))
                size += len(texts[-1].encode()) + ENTRY_BYTES
                check_answer(size, "sequences", "send fewer tokens at a time, or use Detokenize")
            return texts

        with self._counted():
            texts = await self._work(work)
        self._counts.finished += len(texts)
        self._counts.output_tokens += sum(len(sequence.token_ids) for sequence in request.sequences)
        return tokenizer_pb2.DecodeResponse(texts=texts)

    async def Detokenize(
        self,
        requests: AsyncIterator[tokenizer_pb2.DetokenizeRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[tokenizer_pb2.DetokenizeResponse]:
        streams = TokenStreams(self._loaded().vocabulary)
        self._streams.add(streams)
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            async for request in requests:
                if sum(map(_tokens_in, request.items)) <= INLINE_TOKENS:
                    answer = streams.apply(request)
                else:
                    answer = await self._work(partial(streams.apply, request))
                if byte_size(answer) <= MAX_ANSWER_BYTES:
                    yield answer
                else:
                    for run in cut(answer.outputs):
                        yield tokenizer_pb2.DetokenizeResponse(outputs=run)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise unavailable("the tokenizer is stopping", "STOPPING") from None
        finally:
            self._calls.discard(task)
            streams.close()
            self._streams.discard(streams)
            _add(self._counts, streams.counts)

    async def Vocabulary(
        self, request: tokenizer_pb2.VocabularyRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tokenizer_pb2.VocabularyPart]:
        for part in self._loaded().vocabulary.parts():
            yield part

    def load(self) -> node_pb2.Load:
        """Load of all calls. `requests`: Encode and Decode calls, and open token streams."""
        load = node_pb2.Load(draining=self.draining)
        for counts in (self._counts, *(streams.counts for streams in self._streams)):
            _add(load, counts)
        load.requests += sum(streams.open for streams in self._streams)
        return load

    async def stop(self) -> None:
        """Ends the open Detokenize calls, each with UNAVAILABLE (STOPPING)."""
        self._stopping = self.draining = True
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls, timeout=5.0)

    def _loaded(self) -> HFTokenizer:
        if self.tokenizer is None or self.draining:
            raise unavailable("the tokenizer is draining; ask another", "DRAINING")
        return self.tokenizer

    async def _work(self, work: Callable[[], T]) -> T:
        """Runs it in a thread. Raises BatonError."""
        loop = asyncio.get_running_loop()
        if self._working >= MAX_WORK:
            self._counts.failed += 1
            raise exhausted(f"{MAX_WORK} calls are waiting", "QUEUE_FULL", 1000)
        self._working += 1
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._threads, work), WORK_SECONDS)
        except TimeoutError:
            raise deadline_exceeded(f"the work takes longer than {WORK_SECONDS:g} s") from None
        except BatonError:
            self._counts.failed += 1
            raise
        finally:
            self._working -= 1

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._counts.requests += 1
        try:
            yield
        finally:
            self._counts.requests -= 1


class TokenStreams:
    """Applies messages in order; used by one thread at a time, perhaps still when the call has ended.
    `counts` and `open` are this call's share of the load."""

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
        self._open.clear()

    @property
    def open(self) -> int:
        """Open streams."""
        return len(self._open)

    def _apply(
        self, item: tokenizer_pb2.DetokenizeItem, output: tokenizer_pb2.DetokenizeOutput, field: str
    ) -> None:
        size = self._vocabulary.size
        check_token_ids(item.context, size, f"{field}.context")
        check_token_ids(item.token_ids, size, f"{field}.token_ids")
        check_token_ids(item.token_bytes_of, size, f"{field}.token_bytes_of")
        stream = self._open.get(item.id)
        if stream is None:
            stream = self._open_stream(item)
        elif item.context or item.HasField("skip_special_tokens"):
            name = "context" if item.context else "skip_special_tokens"
            raise invalid_field(f"{field}.{name}", ": only in the item that opens a token stream")
        text = stream.feed(item.token_ids)
        self.counts.output_tokens += len(item.token_ids)
        if item.finish:
            text += stream.finish()
            self.counts.finished += 1
            self._drop(item.id)
        output.text = text
        output.finished = item.finish
        output.token_bytes.extend(self._vocabulary.bytes_of(token) for token in item.token_bytes_of)
        check_answer(byte_size(output), field, "send fewer tokens in an item")

    def _open_stream(self, item: tokenizer_pb2.DetokenizeItem) -> Detokenizer:
        if item.id in self._closed:
            raise not_found(f"token stream {item.id} is closed; ids are unique on a call", "STREAM_CLOSED")
        if len(self._open) >= self._max_streams:
            raise exhausted(
                f"{self._max_streams} token streams are open on this call; finish some", "STREAMS"
            )
        skip = item.skip_special_tokens if item.HasField("skip_special_tokens") else True
        stream = self._open[item.id] = Detokenizer(self._vocabulary, item.context, skip)
        return stream

    def _drop(self, name: int) -> None:
        """Closes the stream, but remembers its id for a while: a late item must not open it again."""
        self._open.pop(name, None)
        self._closed[name] = None
        if len(self._closed) > self._max_streams:
            self._closed.popitem(last=False)


def _tokens_in(item: tokenizer_pb2.DetokenizeItem) -> int:
    return len(item.token_ids) + len(item.context) + len(item.token_bytes_of)


def encode_all(
    tokenizer: HFTokenizer, inputs: Sequence[tokenizer_pb2.EncodeInput]
) -> list[tokenizer_pb2.EncodeResult]:
    """One result for each input, in order; each fails by itself."""
    results = [tokenizer_pb2.EncodeResult() for _ in inputs]
    # Texts and rendered chats, with and without special tokens, each with its index.
    batches: dict[tuple[str, bool], list[tuple[int, Any]]] = {}
    for index, (entry, result) in enumerate(zip(inputs, results, strict=True)):
        kind = entry.WhichOneof("kind")
        special = entry.add_special_tokens if entry.HasField("add_special_tokens") else kind == "text"
        try:
            if kind == "text":
                batches.setdefault((kind, special), []).append((index, entry.text))
            elif kind == "chat":
                rendered = _render(tokenizer, entry.chat, f"inputs[{index}].chat")
                result.rendered = rendered.text
                rest = rendered.after(entry.encoded_text) if entry.encoded_text else None
                result.continued = rest is not None
                batches.setdefault((kind, special), []).append((index, rest or rendered))
            else:
                raise invalid_field(f"inputs[{index}]", ": give text or chat")
        except BatonError as error:
            result.error.CopyFrom(to_status(error))
    encoders: dict[str, _Encode] = {"text": tokenizer.encode, "chat": tokenizer.encode_chats}
    for (kind, special), batch in batches.items():
        encoded = _encode(encoders[kind], [each for _, each in batch], special)
        for (index, _), tokens in zip(batch, encoded, strict=True):
            if isinstance(tokens, EncodingFailed):
                field = f"inputs[{index}].{kind}"
                text = f": the model's tokenizer cannot encode this text: {tokens}"
                results[index].error.CopyFrom(to_status(invalid_field(field, text, "TOKENIZER_FAILED")))
            else:
                results[index].token_ids.extend(tokens)
                if kind == "chat" and tokenizer.images is not None and _has_images(inputs[index].chat):
                    image = tokenizer.images.token_id
                    results[index].images.extend(at for at, token in enumerate(tokens) if token == image)
    return results


def _has_images(chat: tokenizer_pb2.ChatPrompt) -> bool:
    return any(part.WhichOneof("kind") != "text" for message in chat.messages for part in message.parts)


_Encode = Callable[[list[Any], bool], list[list[int]]]


def _encode(encode: _Encode, batch: list[Any], special: bool) -> Sequence[list[int] | EncodingFailed]:
    """Where the batch fails, each by itself."""
    try:
        return encode(batch, special)
    except EncodingFailed as error:
        if len(batch) == 1:
            return [error]
        return [_encode(encode, [each], special)[0] for each in batch]


def _render(tokenizer: HFTokenizer, chat: tokenizer_pb2.ChatPrompt, field: str) -> Rendered:
    conversation = read(chat, field, developer="developer" in tokenizer.template)
    explicit = chat.HasField("add_generation_prompt")
    start_answer = chat.add_generation_prompt if explicit else not chat.continue_final_message
    try:
        return tokenizer.render(conversation, start_answer, chat.continue_final_message)
    except NoChatTemplate:
        raise failed_precondition("the model has no chat template; send text", "NO_CHAT_TEMPLATE") from None
    except TemplateFailed as error:
        field += ".messages"
        raise invalid_field(field, f": the model's chat template refuses them: {error}", "TEMPLATE") from None


def _add(total: node_pb2.Load, counts: node_pb2.Load) -> None:
    for field, value in counts.ListFields():
        setattr(total, field.name, getattr(total, field.name) + value)


def _outcome(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return error.reason if isinstance(error, BatonError) else "INTERNAL"
