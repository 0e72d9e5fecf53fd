"""One stream of frames for all open pages. It is collected while at least one is open."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator

import psutil

import baton
from baton.api.openai_fields import Json
from baton.api.page import frames
from baton.api.page.processes import Processes, WatchedProcess, health_of
from baton.api.page.requests import Requests
from baton.api.page.window import KEPT_SECONDS, ROLLING_SECONDS, SAMPLE_SECONDS, Window
from baton.gateway.gateway import Gateway
from baton.rpc.errors import exhausted
from baton.rpc.tasks import Tasks

FRAME_SECONDS = 1.0
REQUESTS_SECONDS = 2.0
"""Each time other processes are asked for what they have recorded."""
TILE_SECONDS = 60.0
"""Figures beside the charts are of the last minute."""
MAX_PAGES = 64
"""Open pages."""


class Feed:
    """Used on one event loop."""

    def __init__(self, gateway: Gateway, address: str, needs_key: bool) -> None:
        """address: the gateway's own. needs_key: clients of its API must show one."""
        self._gateway = gateway
        self._gateway_process = WatchedProcess("gateway", address)
        self._needs_key = needs_key
        self._window = Window(gateway.metrics)
        self._points: deque[list[float | None]] = deque(maxlen=int(KEPT_SECONDS / SAMPLE_SECONDS))
        self._new_points = 0
        """How many of the points are in no frame yet."""
        self._processes = Processes(gateway)
        self.requests = Requests(gateway.traces, gateway.recorder)
        self._maps: dict[str, int] = {}
        """Versions of the page maps that the last frame knew, by address."""
        self._tasks = Tasks()
        self._collecting: list[asyncio.Task[None]] = []
        self._open = 0
        self._number = 0
        self._frame = b""
        self._whole = b""
        """A frame with everything, for pages that have missed the one before `_frame`; empty: none is made
        yet. What has changed since is in the next frame too."""
        self._next = asyncio.Event()
        self._closed = False
        self._process = psutil.Process()

    def start(self) -> None:
        """Begins to take samples."""
        self._tasks.spawn(self._sample(), "page: samples")

    async def close(self) -> None:
        """Ends all streams. Idempotent."""
        self._closed = True
        self._next.set()
        await self._tasks.close()
        await self._processes.close()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """For one page: a frame with everything, then each new one, until the gateway stops. A page that has
        missed one gets everything again. Raises BatonError if too many are open."""
        if self._open >= MAX_PAGES:
            raise exhausted(f"{self._open} pages are open already", "TOO_MANY_PAGES", 1000)
        self._open += 1
        try:
            if not self._collecting:
                self.requests.begin()
                self._collecting = [
                    self._tasks.spawn(self._collect(), "page: frames"),
                    self._tasks.spawn(self._follow_requests(), "page: requests"),
                ]
            known: int | None = None
            while not self._closed:
                number, following = self._number, self._next
                if known != number:
                    if known is None or known != number - 1:
                        self._whole = self._whole or self._encode(whole=True)
                        yield self._whole
                    else:
                        yield self._frame
                    known = number
                else:
                    await following.wait()
        finally:
            self._open -= 1
            if not self._open:
                for task in self._collecting:
                    task.cancel()
                self._collecting.clear()
                self._whole = b""  # the next page may come much later
                await self._processes.close()

    async def _sample(self) -> None:
        while True:
            self._window.add(time.monotonic(), self._gateway.load().requests)
            figures = self._window.figures(ROLLING_SECONDS)
            if figures is not None:
                self._points.append(frames.point(time.time(), figures, self._window.running(-1)))
                self._new_points = min(self._new_points + 1, len(self._points))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _follow_requests(self) -> None:
        while True:
            await self.requests.refresh()
            await asyncio.sleep(REQUESTS_SECONDS)

    async def _collect(self) -> None:
        while True:
            self._processes.refresh()
            self._frame, self._whole = self._encode(whole=False), b""
            self._new_points = 0
            self.requests.sent()
            self._maps = {each.address: each.pages_version for each in self._processes}
            self._number += 1
            self._next.set()
            self._next = asyncio.Event()
            await asyncio.sleep(FRAME_SECONDS)

    def _encode(self, *, whole: bool) -> bytes:
        return json.dumps(self._make(whole=whole), separators=(",", ":")).encode()

    def _make(self, *, whole: bool) -> Json:
        gateway = self._gateway
        this = self._gateway_process
        this.info, this.load = gateway.info(), gateway.load()
        this.info.pid, this.info.version = self._process.pid, baton.__version__
        this.resident_bytes, this.health = (
            self._process.memory_info().rss,
            health_of(this.load),
        )
        others = list(self._processes)
        points = list(self._points)
        model = gateway.model_or_last()
        return {
            "whole": whole,
            "at": time.time(),
            "model": None if model is None else model.name,
            "chat": model is not None and model.chat,
            "needs_key": self._needs_key,
            "targets": {"ttft": gateway.metrics.ttft_target, "itl": gateway.metrics.itl_target},
            "totals": {
                "running": this.load.requests,
                "finished": this.load.finished,
                "failed": this.load.failed,
                "cancelled": this.load.cancelled,
                "output_tokens": gateway.metrics.output_tokens.value,
                "prompt_tokens": this.load.prompt_tokens,
                "cached_tokens": this.load.cached_tokens,
            },
            "minute": frames.figures_json(self._window.figures(TILE_SECONDS)),
            "points": points if whole else points[len(points) - self._new_points :],
            "requests": self.requests.rows(whole=whole),
            "processes": [frames.process_json(each) for each in (this, *others)],
            "pools": {
                each.address: None if each.pages is None else frames.pool_json(each.pages)
                for each in others
                if each.pages_version and (whole or self._maps.get(each.address) != each.pages_version)
            },
            **frames.reasons_json(gateway.metrics, others),
        }
