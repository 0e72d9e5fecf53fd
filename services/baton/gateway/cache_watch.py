"""Follows one worker's cache: the shell that feeds its view."""

from __future__ import annotations

import asyncio
import random

import grpc
import grpc.aio

from baton.gateway.cache_view import FRESH_SECONDS, Gap
from baton.gateway.router import Router
from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
from baton.rpc.logs import get_logger
from baton.v1 import cache_pb2, cache_pb2_grpc

FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 2.0
UNKNOWN_SECONDS = 30.0
"""A node that does not know the service is asked again after so long: it may have been replaced."""

_log = get_logger()


class CacheWatch:
    """Tries again for as long as it is open. What was known stays meanwhile, as it costs time at worst."""

    def __init__(self, address: str, router: Router, dial: Dial = open_channel) -> None:
        self.address = address
        self._router = router
        self._dial = dial
        self._task: asyncio.Task[None] | None = None
        self._left = False

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"cache of {self.address}")

    def leave(self) -> None:
        """The node has been left: what was known of it is forgotten at once. Idempotent."""
        if self._task is not None and not self._left:
            self._left = True
            self._task.cancel()
            self._router.forget(self.address)

    async def close(self) -> None:
        """Leaves it, and returns when nothing is open any more."""
        self.leave()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        backoff, reason = FIRST_BACKOFF_SECONDS, ""
        while True:
            heard = self._router.view(self.address).heard
            try:
                await self._follow()
            except BatonError as error:
                if self._router.view(self.address).heard != heard:
                    backoff, reason = FIRST_BACKOFF_SECONDS, ""
                if error.reason != reason:
                    reason = error.reason
                    _log.info("cache not followed", node=self.address, reason=reason, error=error.message)
                if error.code is grpc.StatusCode.UNIMPLEMENTED:
                    backoff = UNKNOWN_SECONDS
            except Exception:
                _log.exception("cache not followed", node=self.address)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)

    async def _follow(self) -> None:
        """One stream to its end. Raises BatonError."""
        view = self._router.view(self.address)
        async with self._dial(self.address) as channel:
            request = cache_pb2.WatchRequest(incarnation=view.incarnation, sequence=view.sequence)
            call = cache_pb2_grpc.CacheStub(channel).Watch(request)
            try:
                while True:
                    async with asyncio.timeout(FRESH_SECONDS):
                        update = await call.read()
                    if update is grpc.aio.EOF:
                        raise unavailable(f"{self.address} closed the stream", "STREAM_CLOSED")
                    view.apply(update, self._router.clock())
                    self._router.settle(self.address)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            except TimeoutError:
                raise unavailable(f"{self.address} has gone silent", "CACHE_SILENT") from None
            except Gap as gap:
                _log.warning("cache told with a gap", node=self.address, error=str(gap))
                raise unavailable(str(gap), "PROTOCOL") from gap
            finally:
                call.cancel()
