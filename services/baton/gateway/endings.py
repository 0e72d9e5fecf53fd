"""What the log says of requests that have ended."""

from __future__ import annotations

from dataclasses import dataclass

from baton.rpc.logs import get_logger
from baton.rpc.tasks import CoalescedCall

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Ending:
    request: str
    prompt_tokens: int
    output_tokens: int
    resumed: int
    seconds: float


class Endings:
    """A line each; but those that are cancelled in one turn of the event loop share one: when a client goes
    away with hundreds of requests, what they held is freed that much sooner."""

    def __init__(self) -> None:
        self._cancelled: list[Ending] = []
        self._write_soon = CoalescedCall(self._write)

    def tell(self, outcome: str, ending: Ending, reason: str) -> None:
        """outcome: finished, cancelled or failed. reason: of one that did not finish."""
        if outcome == "cancelled":
            self._cancelled.append(ending)
            self._write_soon()
            return
        _log.info(outcome, **_fields([ending]), **({"reason": reason} if reason else {}))

    def _write(self) -> None:
        ended, self._cancelled = self._cancelled, []
        several = {"requests": len(ended)} if len(ended) > 1 else {}
        _log.info("cancelled", **_fields(ended), **several)


def _fields(ended: list[Ending]) -> dict[str, object]:
    return {
        "request": " ".join(each.request for each in ended),
        "prompt_tokens": sum(each.prompt_tokens for each in ended),
        "output_tokens": sum(each.output_tokens for each in ended),
        "resumed": sum(each.resumed for each in ended),
        "seconds": round(max(each.seconds for each in ended), 3),
    }
