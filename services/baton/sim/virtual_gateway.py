"""A gateway's clock, timers, tasks and tokenizer in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from baton.authentication.api_keys import ApiKey, Limits
from baton.config import GatewayConfig
from baton.gateway.runtime import Cancellable
from baton.gateway.shell import GatewayShell
from baton.gateway.tokenizer_client import TokenizerClient
from baton.sim.tasks import Task, sleep
from baton.sim.world import Actor, World
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import node_pb2, tokenizer_pb2


class VirtualTimer:
    def __init__(self, world: World, actor: Actor, seconds: float, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        world.at(seconds, actor, self._fire)

    def cancel(self) -> None:
        self._function = None

    def _fire(self) -> None:
        if self._function is not None:
            self._function()


class VirtualTokenizer(TokenizerClient):
    """Always reachable. A text is token ids in decimal, with a space after each."""

    def __init__(
        self, world: World, actor: Actor, vocabulary: Vocabulary, seconds: Callable[[], float]
    ) -> None:
        """seconds: draws how long a call takes."""
        super().__init__(0.0)
        self.vocabulary = vocabulary
        self.model = node_pb2.ModelInfo(vocab_size=vocabulary.size)
        self._world = world
        self._actor = actor
        self._seconds = seconds

    async def encode(
        self,
        encode_input: tokenizer_pb2.EncodeInput,
        timeout: float,
        asking: Callable[[str], None] = lambda address: None,
    ) -> tokenizer_pb2.EncodeResult:
        asking("tokenizer")
        await sleep(self._world, self._actor, self._seconds())
        if encode_input.WhichOneof("kind") != "chat":
            return tokenizer_pb2.EncodeResult(token_ids=map(int, encode_input.text.split()))
        found = tokenizer_pb2.EncodeResult()
        for part in (part for message in encode_input.chat.messages for part in message.parts):
            if part.WhichOneof("kind") == "text":
                found.token_ids.extend(map(int, part.text.split()))
            else:
                found.images.append(len(found.token_ids))
                found.token_ids.append(0)
        return found


class NotedLog:
    """Lines of the log go into the trace. An error that the real gateway survives and logs ends the run."""

    def __init__(self, world: World, who: str) -> None:
        self._world = world
        self._who = who

    def info(self, event: str, **fields: Any) -> None:
        if self._world.traced:
            self._world.note(self._who, f"logs   {event} {fields}")

    debug = warning = error = info

    def exception(self, event: str, **fields: Any) -> None:
        self.info(event, **fields)
        raise


class VirtualGateway(GatewayShell):
    """Runs on one actor of the world."""

    def __init__(
        self, world: World, actor: Actor, who: str, config: GatewayConfig, tokenizer: TokenizerClient
    ) -> None:
        self.world = world
        self.loop = actor
        self.log = NotedLog(world, who)
        super().__init__(config, tokenizer)
        self.api_key = ApiKey("", Limits())

    def after(self, seconds: float, function: Callable[[], object]) -> VirtualTimer:
        return VirtualTimer(self.world, self.loop, seconds, function)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Cancellable:
        return Task(self.world, self.loop, work)
