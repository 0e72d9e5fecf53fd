"""What a client that has been closed has instead of stubs."""

from __future__ import annotations

from typing import NoReturn

from baton.rpc.errors import failed_precondition


class Closed:
    """The stub of a client that has been closed."""

    def __getattr__(self, method: str) -> NoReturn:
        raise failed_precondition("the client has been closed: make another one", "CLIENT_CLOSED")
