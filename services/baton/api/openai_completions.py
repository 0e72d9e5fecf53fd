"""Answers of /v1/completions: with the prompt in them, without output, or the best of several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain

from baton.api.openai_answers import OpenAIAnswer, RequestBatch
from baton.api.openai_fields import Json
from baton.api.openai_protocol import CompletionRequest
from baton.gateway.token_log import CONTEXT_TOKENS
from baton.tokenizer.detokenize import Detokenizer
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, inference_pb2


class TextOffsets:
    """Where in the text of a choice each of its tokens begins; parts of a character begin where that does."""

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int]) -> None:
        """context: tokens before the text."""
        self._detokenizer = Detokenizer(vocabulary, context)
        self._length = 0

    def next(self, token: int) -> int:
        begin = self._length
        self._length += len(self._detokenizer.feed([token]))
        return begin


class CompletionAnswer(OpenAIAnswer):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, job: RequestBatch, request: CompletionRequest, echo: Callable[[int], Awaitable[str]] | None
    ) -> None:
        """echo: gives the text of a prompt, which its answers begin with; None: they do not."""
        super().__init__(job, request)
        self._make_echo = echo
        self.resumable = echo is None
        self._echoes: list[str] = []
        self._computed = job.n
        """Choices of a prompt."""
        self._n = request.n or 1
        self._with_logprobs = request.logprobs is not None
        self._with_top = bool(request.logprobs)
        self._drops_output = request.drops_output
        self._mean_logprobs = [0.0] * self._choices
        """Mean over each choice's tokens, if the best choices are looked for."""
        self._offsets: list[TextOffsets | None] = [None] * self._choices

    def add(self, index: int, delta: inference_pb2.Delta) -> list[Json]:
        echoed = self._echo(index // self._computed, delta.prompt_logprobs) if delta.prompt_logprobs else []
        if self._n < self._computed:  # of a whole answer, which has one delta for each choice
            values = [position.chosen.logprob for position in delta.logprobs]
            self._mean_logprobs[index] = sum(values) / max(1, len(values))
        return [*echoed, *super().add(index, self._cut(delta))]

    def add_end(self, finished: inference_pb2.Finished) -> None:
        super().add_end(finished)
        if self._drops_output:
            self._output_tokens = 0

    async def begin(self) -> list[Json]:
        if self._make_echo is None:
            return []
        self._echoes = [await self._make_echo(prompt) for prompt in range(self._job.prompts)]
        self._make_echo = None  # it holds the prompts
        if self._with_logprobs:
            return []  # they come with the first delta
        return [chunk for prompt in range(len(self._echoes)) for chunk in self._echo(prompt, ())]

    def whole(self, chunks: Iterable[Json]) -> Json:
        """The best of a prompt's choices, by the mean log-probability of their tokens."""
        whole = super().whole(chunks)
        if self._n < self._computed:
            kept: list[int] = []
            for first in range(0, self._choices, self._computed):
                choices = range(first, first + self._computed)
                kept += sorted(choices, key=self._mean_logprobs.__getitem__, reverse=True)[: self._n]
            whole["choices"] = [
                {**whole["choices"][index], "index": number} for number, index in enumerate(kept)
            ]
        return whole

    def _cut(self, delta: inference_pb2.Delta) -> inference_pb2.Delta:
        """The part of a delta that is given out."""
        if self._drops_output:
            return inference_pb2.Delta(choice=delta.choice, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        if not self._with_logprobs:
            delta.ClearField("logprobs")  # they were asked for to find the best
        return delta

    def _echo(self, prompt: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> list[Json]:
        """The prompt as a chunk for each of its choices."""
        chunks = []
        for index in range(prompt * self._computed, (prompt + 1) * self._computed):
            formatted = self._format_logprobs(index, logprobs) if logprobs else None
            text = self._echoes[prompt]
            choice = {"index": index, "text": text, "logprobs": formatted, "finish_reason": None}
            chunks.append(self.chunk([choice]))
        return chunks

    def _part(self, index: int, delta: inference_pb2.Delta) -> Json:
        return {"text": delta.text}

    def _complete(self, parts: Sequence[Json]) -> Json:
        """parts: perhaps the prompt, and the output."""
        found = [part["logprobs"] for part in parts if part["logprobs"]]
        logprobs = {
            name: value and [*chain(*(each[name] for each in found))]
            for name, value in (*found, {})[0].items()
        }
        return {**parts[-1], "text": "".join(part["text"] for part in parts), "logprobs": logprobs or None}

    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json:
        tokens, values, tops, offsets = [], [], [], []
        prompt, vocabulary = self._job.prompt_ids(index // self._computed), self._job.vocabulary
        text_offsets = self._offsets[index]
        if text_offsets is None:
            text_offsets = TextOffsets(vocabulary, () if self._echoes else prompt[-CONTEXT_TOKENS:])
            self._offsets[index] = text_offsets
        for position in logprobs:
            known = position.HasField("chosen")  # not of a prompt's first token, which nothing predicts
            token = position.chosen.token_id if known else prompt[0]
            tokens.append(_text(position.chosen.token_bytes if known else vocabulary.bytes_of(token)))
            values.append(position.chosen.logprob if known else None)
            tops.append(_likeliest(position) if known else None)
            offsets.append(text_offsets.next(token))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self._with_top else None,
            "text_offset": offsets,
        }


def _likeliest(position: common_pb2.PositionLogprobs) -> dict[str, float]:
    """Texts of the likeliest tokens, and of the chosen one: of tokens with one text that one, else the
    likeliest."""
    found: dict[str, float] = {}
    for entry in position.top:
        found.setdefault(_text(entry.token_bytes), entry.logprob)
    found[_text(position.chosen.token_bytes)] = position.chosen.logprob
    return found


def _text(token_bytes: bytes) -> str:
    """What is no text by itself, as OpenAI writes it: U+FFFD would be one name for many tokens."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
