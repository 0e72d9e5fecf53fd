"""Sessions on real processes: each turn is answered as its whole sequence would be, from cached pages."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment
from google.rpc import code_pb2
from streams import Inference, inference

from baton.client import Client
from baton.rpc.errors import from_status
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2, tokenizer_pb2_grpc

Message = tokenizer_pb2.ChatMessage
PAGE = 16
QUESTIONS = ["What is a list?", "And a tuple?", "Which is faster?", "Why?", "Name a method.", "Another."]


def greedy(count: int = 24, **fields) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0, max_tokens=count, **fields)


@pytest.fixture
def stream(demo: Deployment) -> Iterator[Inference]:
    with inference(demo.gateway.address) as stream:
        yield stream


@pytest.fixture
def client(demo: Deployment) -> Client:
    return demo.client()


class Turn:
    """Starts one and reads it to its end."""

    def __init__(self, stream: Inference, id: str, **fields) -> None:
        fields.setdefault("sampling", greedy())
        stream.start(id, **fields)
        self.text, self.token_ids = "", []
        while True:
            event = stream.next()
            assert event.id == id
            if event.WhichOneof("kind") == "delta":
                self.text += event.delta.text
                self.token_ids += event.delta.token_ids
                self.stop_matched = event.delta.stop_matched
                self.stopped = event.delta.finish_reason == common_pb2.FINISH_REASON_STOP
            elif event.WhichOneof("kind") != "accepted":
                break
        assert event.WhichOneof("kind") == "finished", event
        self.usage = event.finished.usage


def ask(question: str) -> dict:
    return {"chat": tokenizer_pb2.ChatPrompt(messages=[Message(role="user", content=question)])}


class Reference:
    """What a session's prompts must be, made from the Tokenizer service alone."""

    def __init__(self, demo: Deployment) -> None:
        self._channel = grpc.insecure_channel(demo.tokenizer.address)
        self._stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._messages: list[Message] = []
        self._text = ""
        self.ids: list[int] = []

    def encode(self, **fields) -> tokenizer_pb2.EncodeResult:
        given = tokenizer_pb2.EncodeInput(**fields)
        return self._stub.Encode(tokenizer_pb2.EncodeRequest(inputs=[given]), timeout=10).results[0]

    def asks(self, question: str) -> list[int]:
        """The prompt of the next chat turn."""
        self._messages.append(Message(role="user", content=question))
        rendered = self.encode(chat=tokenizer_pb2.ChatPrompt(messages=self._messages)).rendered
        assert rendered.startswith(self._text)
        self.ids += self.encode(text=rendered.removeprefix(self._text), add_special_tokens=False).token_ids
        self._text = rendered
        return list(self.ids)

    def answered(self, turn: Turn) -> None:
        self._messages.append(Message(role="assistant", content=turn.text))
        self._text += turn.text
        self.ids += turn.token_ids[:-1] if turn.stopped else turn.token_ids


@pytest.fixture
def references(demo: Deployment) -> list[Reference]:
    return [Reference(demo), Reference(demo)]


def test_many_turns_of_two_chats_on_one_stream(stream, client, references: list[Reference]):
    held = [0, 0]
    for number, question in enumerate(QUESTIONS):
        for each, reference in enumerate(references):
            asked = f"{question} {each}"
            turn = Turn(stream, f"{each}-{number}", session=str(each), **ask(asked))
            prompt = reference.asks(asked)
            assert turn.usage.prompt_tokens == len(prompt)
            assert turn.usage.cached_tokens >= held[each] // PAGE * PAGE, "earlier turns are computed again"
            alone = client.generate(token_ids=prompt, temperature=0.0, max_tokens=24)
            assert turn.token_ids == alone.choices[0].token_ids
            reference.answered(turn)
            held[each] = len(prompt) + len(turn.token_ids) - 1
    assert references[0].ids != references[1].ids


def test_text_and_token_turns_continue_one_sequence(stream, client, references: list[Reference]):
    reference, sequence = references[0], []
    for number, text in enumerate(("The list type", " and the tuple type", " are", " sequences.")):
        ids = list(reference.encode(text=text, add_special_tokens=not number).token_ids)
        prompt = {"tokens": inference_pb2.TokenPrompt(token_ids=ids)} if number % 2 else {"text": text}
        turn = Turn(stream, str(number), session="s", **prompt)
        sequence += ids
        alone = client.generate(token_ids=sequence, temperature=0.0, max_tokens=24)
        assert turn.usage.prompt_tokens == len(sequence)
        assert turn.token_ids == alone.choices[0].token_ids
        sequence += turn.token_ids


def test_failed_and_cancelled_turns_leave_no_trace(stream, references: list[Reference], client):
    first = Turn(stream, "first", session="s", **ask(QUESTIONS[0]))
    reference = references[0]
    reference.asks(QUESTIONS[0])
    reference.answered(first)
    stream.start("cancelled", session="s", sampling=greedy(1500, ignore_eos=True), **ask("Tell me more."))
    while stream.next().WhichOneof("kind") != "delta":
        pass
    stream.start("early", session="s", **ask("Too early."))
    assert from_status(stream.terminal("early").failed).reason == "SESSION_BUSY"
    stream.cancel("cancelled")
    assert stream.terminal("cancelled").failed.code == code_pb2.CANCELLED
    stream.start("wrong", session="s", sampling=greedy(0), **ask("Wrong."))
    assert from_status(stream.terminal("wrong").failed).field == "sampling.max_tokens"
    stream.start("text", session="s", text="Of another kind.")
    assert from_status(stream.terminal("text").failed).field == "session"
    second = Turn(stream, "second", session="s", **ask(QUESTIONS[1]))
    prompt = reference.asks(QUESTIONS[1])
    assert second.usage.prompt_tokens == len(prompt)
    alone = client.generate(token_ids=prompt, temperature=0.0, max_tokens=24)
    assert second.token_ids == alone.choices[0].token_ids


def test_a_stop_string_ends_a_turn_and_the_chat_goes_on(stream, client):
    whole = Turn(stream, "whole", **ask(QUESTIONS[0]))
    stop = whole.text[5:9]
    first = Turn(stream, "one", session="s", sampling=greedy(stop=[stop]), **ask(QUESTIONS[0]))
    assert first.stop_matched == stop
    assert first.text == whole.text[: whole.text.index(stop)]
    second = Turn(stream, "two", session="s", **ask(QUESTIONS[1]))
    said = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    alone = client.generate(messages=said, temperature=0.0, max_tokens=24)
    assert (second.text, second.usage.prompt_tokens) == (alone.text, alone.usage.prompt_tokens)


def test_a_session_that_has_filled_the_context(stream):
    sampling = greedy(700, ignore_eos=True)
    for number in range(2):
        Turn(stream, str(number), session="s", text="hello", sampling=sampling)
    stream.start("full", session="s", text="hello " * 700, sampling=sampling)
    assert from_status(stream.terminal("full").failed).field == "text"
    turn = Turn(stream, "last", session="s", text="hello", sampling=greedy(8, ignore_eos=True))
    assert len(turn.token_ids) == 8
