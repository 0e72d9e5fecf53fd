"""The Python client: `Client` for threads, `AsyncClient` for asyncio, and what they return.

    with Client() as client:
        for delta in client.stream("def add(a, b):", max_tokens=64):
            print(delta.text, end="", flush=True)

Errors are `BatonError` with `code`, `reason`, `message` and, where one is wrong, `field`. Importing this
package loads gRPC and nothing heavier.
"""

from baton.client.async_client import AsyncClient, AsyncSession, AsyncStream
from baton.client.sync_client import Client, Session, Stream
from baton.client.types import (
    DEFAULT_ADDRESS,
    Choice,
    Completion,
    Delta,
    Embeddings,
    EmbedOptions,
    Grammar,
    Input,
    Message,
    Model,
    Options,
    PositionLogprobs,
    Stats,
    TokenLogprob,
    Tool,
    ToolCall,
    ToolChoice,
    Usage,
)
from baton.rpc.errors import BatonError

__all__ = [
    "DEFAULT_ADDRESS",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "BatonError",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "EmbedOptions",
    "Embeddings",
    "Grammar",
    "Input",
    "Message",
    "Model",
    "Options",
    "PositionLogprobs",
    "Session",
    "Stats",
    "Stream",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "Usage",
]
