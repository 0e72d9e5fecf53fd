"""The server's side of a long-lived stream: its first message, and the ways in which its reader ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc.aio

from baton.rpc.errors import deadline_exceeded, invalid

T = TypeVar("T")

HELLO_SECONDS = 10.0

STREAM_ENDED = (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError)
"""What reading from a call raises once its other half has ended it. No error of the reader's."""


async def first_message(messages: AsyncIterator[T], method: str) -> T:
    """The message that opens a stream. Raises BatonError when it does not come within HELLO_SECONDS."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(aiter(messages), None)
    except TimeoutError:
        text = f"{method} was opened, and no `hello` came within {HELLO_SECONDS:g} s"
        raise deadline_exceeded(text) from None
    if first is None:
        raise invalid("hello", f"{method} was closed without its first message, `hello`")
    return first
