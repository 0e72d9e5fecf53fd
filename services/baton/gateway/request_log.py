"""The request log: one line for each request, with its whole story."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.rpc.errors import BatonError
from baton.rpc.logs import get_logger
from baton.rpc.tasks import CoalescedCall

_FIELD = re.compile(r"[\w.\[\]]{1,80}")
"""Names of fields that are logged: others may be anything that a client has sent."""
_QUOTED = re.compile(r"(?<!\w)(['\"]).*\1", re.DOTALL)
"""What a client has sent is quoted in messages. To the last quote, as there may be others within."""
MAX_MESSAGE = 200
"""Characters."""
REPEAT_SECONDS = 10.0
"""Refusals that differ in nothing share a line for this time."""
MAX_REFUSALS = 64
"""Different refusals in this time; further ones share a line."""

_log = get_logger()


@dataclass(frozen=True, slots=True)
class EndedRequest:
    request: str
    prompt_tokens: int
    output_tokens: int
    resumed: int
    seconds: float
    api: str = ""
    """grpc or http."""
    key: str = ""
    """Name of the API key; empty: there are none."""
    model: str = ""
    cached_tokens: int = 0
    image_tokens: int = 0
    """Those of prompt_tokens that stand for images."""
    finish: str = ""
    """Why the first choice ended: stop or length."""
    way: str = ""
    """split or local: where the prompt was computed."""
    decode: str = ""
    prefill: str = ""
    retries: int = 0
    """Hand-offs tried again, in the last attempt."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase."""


class RequestLog:
    """Requests cancelled in one iteration of the event loop share a line, so that a client that disconnects
    with hundreds of requests is handled faster."""

    def __init__(self) -> None:
        self._cancelled: list[EndedRequest] = []
        self._write_soon = CoalescedCall(self._write)
        self._refused: dict[tuple[tuple[str, object], ...], int] = {}
        """Refusals of the last REPEAT_SECONDS, and how many more of each there were than have a line."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, outcome: str, request: EndedRequest, error: BatonError | None) -> None:
        """outcome: finished, cancelled or failed. error: of requests that did not finish."""
        if outcome == "cancelled":
            self._cancelled.append(request)
            self._write_soon()
            return
        why = {"reason": error.reason, **_described(error.field, error.message)} if error is not None else {}
        _log.info(outcome, **_story(request), **why)

    def refused(self, api: str, reason: str, field: str | None, message: str = "", **more: object) -> None:
        """A request was refused before it had a name. The first of its like has a line at once, those of the
        next seconds share one."""
        described = _described(field, message)
        line = {"api": api, "reason": reason, **more, **described}
        what = tuple((name, value) for name, value in line.items() if name != "message")
        if what in self._refused:
            self._refused[what] += 1
        elif len(self._refused) < MAX_REFUSALS:
            self._refused[what] = 0
            _log.info("refused", **line)
        else:
            others = (("reason", "OTHER"),)
            self._refused[others] = self._refused.get(others, 0) + 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._write_refused)

    def close(self) -> None:
        """Writes what is still to be written."""
        if self._timer is not None:
            self._timer.cancel()
            self._write_refused()

    def _write_refused(self) -> None:
        self._timer = None
        again = {what: count for what, count in self._refused.items() if count}
        for what, count in again.items():
            _log.info("refused", **dict(what), requests=count)
        # These may go on: they have no line before the next one.
        self._refused = dict.fromkeys(again, 0)
        if again:
            self._timer = asyncio.get_running_loop().call_later(REPEAT_SECONDS, self._write_refused)

    def _write(self) -> None:
        ended, self._cancelled = self._cancelled, []
        if len(ended) == 1:
            _log.info("cancelled", **_story(ended[0]))
        else:
            _log.info("cancelled", **_sums(ended), requests=len(ended))


def _described(field: str | None, message: str) -> Mapping[str, str | None]:
    """The field and the message of an error, without what a client has sent."""
    known = bool(field) and bool(_FIELD.fullmatch(field or ""))
    if field and not known:
        message = message.replace(field, "…")
    text = _QUOTED.sub("'…'", message)[:MAX_MESSAGE]
    return ({"field": field} if known else {}) | ({"message": text} if text else {})


def _story(request: EndedRequest) -> dict[str, object]:
    """What is empty or 0 is left out, but for the counts that every line has."""
    details = {
        "api": request.api,
        "key": request.key,
        "model": request.model,
        "cached_tokens": request.cached_tokens,
        "image_tokens": request.image_tokens,
        "finish": request.finish,
        "way": request.way,
        "decode": request.decode,
        "prefill": request.prefill,
        "retries": request.retries,
    }
    times = {f"{name}_ms": round(1000 * seconds, 1) for name, seconds in request.phases.items()}
    return {**_sums([request]), **{name: value for name, value in details.items() if value}, **times}


def _sums(ended: list[EndedRequest]) -> dict[str, object]:
    return {
        "request": " ".join(each.request for each in ended),
        "prompt_tokens": sum(each.prompt_tokens for each in ended),
        "output_tokens": sum(each.output_tokens for each in ended),
        "resumed": sum(each.resumed for each in ended),
        "seconds": round(max(each.seconds for each in ended), 3),
    }
