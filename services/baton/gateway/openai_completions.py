"""Answers of /v1/completions: with the prompt in them, without output, or the best of several."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from baton.gateway.openai_answers import Answer, Json, RequestBatch
from baton.gateway.openai_protocol import CompletionRequest
from baton.v1 import common_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its answers begin with."""

    text: str
    first_token: bytes
    """Of the prompt; log-probabilities do not name it, because nothing predicts it."""


class CompletionAnswer(Answer):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, job: RequestBatch, request: CompletionRequest, echo: Callable[[int], Awaitable[Echo]] | None
    ) -> None:
        """echo: makes that of a prompt, once it is accepted; None: the answers do not begin with it."""
        super().__init__(job, request)
        self._make_echo = echo
        self._echoes: list[Echo] = []
        self._computed = job.n
        """Choices of a prompt."""
        self._n = request.n or 1
        self._with_logprobs = request.logprobs is not None
        self._with_top = bool(request.logprobs)
        self._drops_output = request.drops_output
        self._prompt_logprobs: dict[int, list[common_pb2.PositionLogprobs]] = {}
        self._offsets = [0] * len(self._texts)

    def add(self, index: int, delta: inference_pb2.Delta) -> None:
        if delta.prompt_logprobs:
            self._prompt_logprobs[index // self._computed] = list(delta.prompt_logprobs)
        super().add(index, self._cut(delta))

    def chunks_of(self, index: int, delta: inference_pb2.Delta) -> list[Json]:
        echoed = self._echo(index // self._computed, delta.prompt_logprobs) if delta.prompt_logprobs else []
        return [*echoed, *super().chunks_of(index, self._cut(delta))]

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

    def whole(self) -> Json:
        """The best of a prompt's choices, by the mean log-probability of their tokens."""
        whole = super().whole()
        if self._n < self._computed:
            kept: list[int] = []
            for first in range(0, len(self._texts), self._computed):
                choices = range(first, first + self._computed)
                kept += sorted(choices, key=self._mean_logprob, reverse=True)[: self._n]
            whole["choices"] = [
                {**whole["choices"][index], "index": number} for number, index in enumerate(kept)
            ]
        return whole

    def _mean_logprob(self, index: int) -> float:
        values = [position.chosen.logprob for position in self._logprobs[index]]
        return sum(values) / max(1, len(values))

    def _cut(self, delta: inference_pb2.Delta) -> inference_pb2.Delta:
        """Of a delta, what is given out."""
        if not self._drops_output:
            return delta
        return inference_pb2.Delta(choice=delta.choice, finish_reason=common_pb2.FINISH_REASON_LENGTH)

    def _echo(self, prompt: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> list[Json]:
        """The prompt as a chunk for each of its choices."""
        chunks = []
        for index in range(prompt * self._computed, (prompt + 1) * self._computed):
            formatted = self._format_logprobs(index, logprobs) if logprobs else None
            text = self._echoes[prompt].text
            choice = {"index": index, "text": text, "logprobs": formatted, "finish_reason": None}
            chunks.append(self.chunk([choice]))
        return chunks

    def _logprobs_of(self, index: int) -> list[common_pb2.PositionLogprobs]:
        if not self._with_logprobs:
            return []  # they were asked for to find the best
        return [*self._prompt_logprobs.get(index // self._computed, ()), *self._logprobs[index]]

    def _part(self, index: int, delta: inference_pb2.Delta) -> Json:
        return {"text": delta.text}

    def _complete(self, index: int, text: str) -> Json:
        echo = self._echoes[index // self._computed].text if self._echoes else ""
        return {"text": echo + text}

    def _format_logprobs(self, index: int, logprobs: Sequence[common_pb2.PositionLogprobs]) -> Json:
        tokens, values, tops, offsets = [], [], [], []
        for position in logprobs:
            known = position.HasField("chosen")
            first = (
                position.chosen.token_bytes if known else self._echoes[index // self._computed].first_token
            )
            tokens.append(first.decode("utf-8", "replace"))
            values.append(position.chosen.logprob if known else None)
            tops.append(_likeliest(position) if known else None)
            offsets.append(self._offsets[index])
            self._offsets[index] += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops if self._with_top else None,
            "text_offset": offsets,
        }


def _likeliest(position: common_pb2.PositionLogprobs) -> dict[str, float]:
    """Texts of the likeliest tokens, and of the chosen one. Of tokens with one text (parts of characters are
    U+FFFD) the likeliest is there."""
    found: dict[str, float] = {}
    for entry in (*position.top, position.chosen):
        found.setdefault(_text(entry), entry.logprob)
    return found


def _text(entry: common_pb2.TokenLogprob) -> str:
    return entry.token_bytes.decode("utf-8", "replace")
