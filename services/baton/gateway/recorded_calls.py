"""Calls of clients that are no requests for tokens: counted, limited, and recorded when they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.authentication.api_keys import ApiKey
from baton.gateway.gateway import Gateway
from baton.gateway.request_log import EndedRequest
from baton.rpc.errors import BatonError, internal


@dataclass(slots=True)
class RecordedCall:
    name: str
    """The call's name in the log."""
    tokens: int = 0
    """Tokens of its prompts, once they are known."""


@contextmanager
def recorded_call(gateway: Gateway, api_key: ApiKey, api: str, *, computes: bool) -> Iterator[RecordedCall]:
    """Has a line in the request log; one that computes something counts in the key's metrics too. Raises
    BatonError if no call can be taken now."""
    began, outcome = time.monotonic(), "failed"
    why: BatonError | None = internal("a call failed")
    made = RecordedCall(f"{gateway.incarnation:016x}-{gateway.next_number()}")
    with gateway.call(api_key):
        try:
            yield made
            outcome, why = "finished", None
        except BatonError as error:
            why, error.recorded = error, True
            raise
        except asyncio.CancelledError:
            outcome, why = "cancelled", None
            raise
        finally:
            took = time.monotonic() - began
            ended = EndedRequest(
                made.name, made.tokens, 0, 0, took, api=api, key=api_key.name, model=gateway.model_name
            )
            gateway.request_log.add(outcome, ended, why)
            if computes:
                gateway.metrics.ended(outcome, api_key.name, made.tokens, 0, took)
