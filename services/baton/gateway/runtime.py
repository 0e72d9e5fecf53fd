"""What executes a gateway's requests and decode connections: a process, or a simulation in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from baton.rpc.errors import BatonError
from baton.v1 import decode_pb2, node_pb2


class Cancellable(Protocol):
    """A timer or a task."""

    def cancel(self) -> object: ...


class GatewayLog(Protocol):
    def debug(self, event: str, **fields: Any) -> object: ...
    def info(self, event: str, **fields: Any) -> object: ...
    def warning(self, event: str, **fields: Any) -> object: ...
    def error(self, event: str, **fields: Any) -> object: ...
    def exception(self, event: str, **fields: Any) -> object: ...


class DecodeLink(Protocol):
    """A stream to a decode node: rpc.link.Link."""

    @property
    def connected(self) -> bool: ...

    @property
    def last_error(self) -> BatonError | None: ...

    def start(self) -> None: ...

    def send(self, request: decode_pb2.GenerateCommand) -> bool: ...

    def reset(self, error: BatonError) -> None: ...

    async def close(self) -> None: ...


class GatewayRuntime:
    """Everything runs on one event loop, or as if it did."""

    incarnation: int
    log: GatewayLog

    def clock(self) -> float:
        """Monotonic seconds."""
        raise NotImplementedError

    def after(self, seconds: float, function: Callable[[], object]) -> Cancellable:
        """Calls the function once."""
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Cancellable:
        """Runs the coroutine."""
        raise NotImplementedError

    def make_link(
        self,
        address: str,
        hello: Callable[[], decode_pb2.GenerateCommand],
        on_message: Callable[[decode_pb2.StepEvents], None],
        on_up: Callable[[decode_pb2.StepEvents], None],
        on_down: Callable[[BatonError], None],
    ) -> DecodeLink:
        """A stream to a decode node, not yet started; the callbacks are rpc.link.Link's."""
        raise NotImplementedError

    async def node_info(self, address: str) -> node_pb2.NodeInfo:
        """Node.GetInfo of a worker. Raises BatonError."""
        raise NotImplementedError

    async def set_role(self, address: str, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        """Node.SetRole of a worker, within whose `seconds` what runs there may end. Raises BatonError."""
        raise NotImplementedError

    async def pictures_address(self) -> str:
        """host:port where workers fetch images (baton.v1.Pictures). Raises BatonError."""
        raise NotImplementedError

    async def take_log(self, name: tuple[int, int]) -> decode_pb2.DecodeLog | None:
        """The log of a request of another gateway, by its incarnation and number: from the decode node that
        has it, which gives it to nobody else."""
        raise NotImplementedError

    def follow_load(self, address: str) -> Cancellable:
        """Keeps the router's view of a worker's cache and load up to date until cancelled."""
        raise NotImplementedError
