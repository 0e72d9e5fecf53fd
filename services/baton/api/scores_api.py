"""/v1/score and /v1/rerank: how well texts go together, by the model's log-probabilities.

The score of a text after another is the mean log-probability of its tokens there. A document's relevance to a
query is how well the query goes after the document (query likelihood: Ponte and Croft, 1998).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from baton.api.http_requests import BodyReader, name_ignored, running
from baton.api.openai_errors import ApiError, invalid_value
from baton.api.openai_fields import Elements, Int32, Json, Strict
from baton.api.openai_protocol import MAX_PROMPTS
from baton.gateway.admission import check_room
from baton.gateway.gateway import Gateway
from baton.rpc.errors import BatonError
from baton.v1 import inference_pb2

AFTER = ", with what is scored after it"


class ScoreCommon(Strict):
    HINTS: ClassVar[Mapping[str, str]] = {"user": "names the caller's own user"}

    model: str
    priority: Int32 | None = None
    cache_salt: str | None = None


class ScoreRequest(ScoreCommon):
    """POST /v1/score."""

    text_1: str | Elements[str]
    text_2: str | Elements[str]


class RerankRequest(ScoreCommon):
    """POST /v1/rerank."""

    query: str
    documents: Elements[str]
    top_n: Int32 | None = None
    return_documents: bool = True


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """A text, what is scored after it, and the field of each."""

    first: str
    second: str
    fields: tuple[str, str]


def add_scores(app: FastAPI, gateway: Gateway, bodies: BodyReader) -> None:
    """Adds the routes."""

    async def score(
        request: Request, body: ScoreCommon, pairs: Sequence[ScoredPair]
    ) -> tuple[str, list[float], int]:
        """A name, the score of each pair, and the number of prompt tokens."""
        starts, counts = await _starts(gateway, body, pairs)
        scores, tokens = [0.0] * len(pairs), 0
        try:
            async with running(gateway, starts, request) as job:
                async for number, event in job.events():
                    if isinstance(event, inference_pb2.Finished):
                        tokens += event.usage.prompt_tokens
                    elif event.prompt_logprobs:
                        logprobs = event.prompt_logprobs[-counts[number] :]
                        scores[number] = math.fsum(each.chosen.logprob for each in logprobs) / len(logprobs)
        except ApiError as error:
            raise _of_pair(error, pairs) from None
        return job.name, scores, tokens

    @app.post("/score")
    @app.post("/v1/score")
    async def scores(request: Request) -> Response:
        body = await bodies.read(request, ScoreRequest, score_pairs)
        name, found, tokens = await score(request, body.request, body.made)
        data = [{"object": "score", "index": index, "score": each} for index, each in enumerate(found)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        answer = {"id": f"score-{name}", "object": "list", "model": body.request.model, "data": data}
        return name_ignored(JSONResponse({**answer, "usage": usage}), body.ignored)

    @app.post("/rerank")
    @app.post("/v2/rerank")
    @app.post("/v1/rerank")
    async def rerank(request: Request) -> Response:
        body = await bodies.read(request, RerankRequest, rerank_pairs)
        name, found, tokens = await score(request, body.request, body.made)
        best = sorted(range(len(found)), key=lambda index: -found[index])[: body.request.top_n]
        results: list[Json] = [
            {"index": index, "relevance_score": math.exp(found[index])}
            | ({"document": {"text": body.request.documents[index]}} if body.request.return_documents else {})
            for index in best
        ]
        answer = {"id": f"rerank-{name}", "model": body.request.model, "results": results}
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return name_ignored(JSONResponse({**answer, "usage": usage}), body.ignored)


def score_pairs(body: ScoreRequest) -> list[ScoredPair]:
    """One text with each of the others, or two lists pair by pair. Raises ApiError."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    _check_count(first, "text_1")
    _check_count(second, "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        text = f"text_1 has {len(first)} texts and text_2 {len(second)}: give one, or as many"
        raise invalid_value("text_1", text)
    names = ["text_1" if isinstance(body.text_1, str) else "text_1[{}]", "text_2"]
    names[1] += "" if isinstance(body.text_2, str) else "[{}]"
    return _pairs(
        body,
        [
            ScoredPair(one, other, (names[0].format(min(index, len(first) - 1)), names[1].format(index)))
            for index, (one, other) in enumerate(zip(first, second, strict=True))
        ],
    )


def rerank_pairs(body: RerankRequest) -> list[ScoredPair]:
    """Raises ApiError."""
    if body.top_n is not None and body.top_n < 1:
        raise invalid_value("top_n", f"top_n must be at least 1, not {body.top_n}")
    _check_count(body.documents, "documents")
    return _pairs(
        body,
        [
            ScoredPair(f"{document}\n", body.query, (f"documents[{index}]", "query"))
            for index, document in enumerate(body.documents)
        ],
    )


def _check_count(texts: Sequence[str], field: str) -> None:
    """Before anything is made of them."""
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise invalid_value(field, f"{field}: give 1 to {MAX_PROMPTS} texts, not {len(texts)}")


def _pairs(body: ScoreCommon, pairs: list[ScoredPair]) -> list[ScoredPair]:
    f"{body.model}{body.cache_salt}".encode()  # raises UnicodeEncodeError for a lone surrogate
    if not body.model:
        raise invalid_value("model", "model is empty: name one of /v1/models")
    for pair in pairs:
        for text, name in zip((pair.first, pair.second), pair.fields, strict=True):
            text.encode()  # likewise
            if not text.strip("\n"):
                raise invalid_value(name, f"{name} is empty: give at least one character")
    return pairs


async def _starts(
    gateway: Gateway, body: ScoreCommon, pairs: Sequence[ScoredPair]
) -> tuple[list[inference_pb2.GenerateStart], list[int]]:
    """The requests, and how many tokens at the end of each prompt are scored. Raises ApiError and
    BatonError."""
    first = await _encode(gateway, {pair.first: pair.fields[0] for pair in pairs}, special=True)
    second = await _encode(gateway, {pair.second: pair.fields[1] for pair in pairs}, special=False)
    starts = []
    model = gateway.model_or_last()
    for pair in pairs:
        if model is not None:
            tokens = len(first[pair.first]) + len(second[pair.second])
            try:
                check_room(tokens, model.context_length, pair.fields[0], 1)
            except BatonError as error:
                error.text, error.named = f"{AFTER}: {error.text}", True
                raise
        await asyncio.sleep(0)  # each may be as long as the context, and there may be hundreds
        start = inference_pb2.GenerateStart(
            id="http", model=body.model, include_token_ids=False, namespace=body.cache_salt or ""
        )
        start.tokens.token_ids.extend([*first[pair.first], *second[pair.second]])
        # One token is computed, and not given out.
        start.sampling.max_tokens, start.sampling.temperature, start.sampling.prompt_logprobs = 1, 0, 0
        if body.priority is not None:
            start.priority = body.priority
        starts.append(start)
    return starts, [len(second[pair.second]) for pair in pairs]


async def _encode(gateway: Gateway, fields: Mapping[str, str], *, special: bool) -> dict[str, list[int]]:
    """The tokens of each text. fields: the field of each text."""
    texts, most = list(fields), gateway.config.max_prompt_bytes
    for text in texts:
        if len(text) > most:
            raise invalid_value(fields[text], f"{fields[text]} has more than the {most} bytes allowed here")
    seconds = gateway.config.request_seconds
    try:
        encoded = await gateway.tokenizer.encode_texts(texts, seconds, special=special)
    except BatonError as error:
        if error.field is not None:
            error.field = fields[texts[int(error.field[1:-1])]]
        raise
    for text, tokens in zip(texts, encoded, strict=True):
        if not tokens and not special:
            raise invalid_value(fields[text], f"{fields[text]} has no tokens")
    return dict(zip(texts, encoded, strict=True))


def _of_pair(error: ApiError, pairs: Sequence[ScoredPair]) -> ApiError:
    """The error of a prompt, of which the client knows nothing."""
    param = error.param or ""
    if param == "prompt" or param.startswith("prompt["):
        number = param.removeprefix("prompt").strip("[]") or "0"
        error.param = pairs[int(number.partition("]")[0])].fields[0]
        error.message = f"{error.param}{AFTER}: {error.message}"
    return error
