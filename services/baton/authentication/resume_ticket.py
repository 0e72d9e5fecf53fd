"""Resume tickets: what a gateway must know to go on with a request that another one had begun.

A client keeps the ticket and can neither read nor change it. It is sealed by Fernet (encryption and HMAC,
from `cryptography`) under a key that all gateways derive from the cluster's secret.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

import grpc
import msgspec
from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from baton.authentication.api_keys import ApiKey
from baton.rpc.errors import BatonError, failed_precondition, invalid

MAX_TICKET_CHARACTERS = 1024


class ResumeTicket(msgspec.Struct, frozen=True, array_like=True):
    digest: bytes
    """Digest of prompt and parameters: `resumption.request_digest`."""
    seed: int
    fingerprint: str
    """Fingerprint of the model."""
    key: bytes
    """`ApiKey.identity`."""
    expires: float
    """Unix time at which the request's own time is over."""
    name: tuple[int, int]
    """The gateway's incarnation and the request's number there, by which a decode node may keep its log."""
    first: str
    """What the gateway that began the request called it; clients may know it by that."""
    resumed: int
    """How often the request was resumed."""


class TicketSeal:
    """Seals tickets and opens them. now: Unix time, so that gateways on several hosts agree."""

    def __init__(self, secret: str, now: Callable[[], float] = time.time) -> None:
        key = HKDF(SHA256(), 32, salt=None, info=b"baton resume tickets").derive(secret.encode())
        self._fernet = Fernet(base64.urlsafe_b64encode(key))
        self.now = now

    def seal(self, ticket: ResumeTicket) -> str:
        return self._fernet.encrypt(msgspec.msgpack.encode(ticket)).decode()

    def open(self, text: str, api_key: ApiKey) -> ResumeTicket:
        """Raises BatonError for a ticket that no gateway of the deployment has sealed, that has expired, or
        that belongs to another API key."""
        try:
            if len(text) > MAX_TICKET_CHARACTERS or not text.isascii():
                raise InvalidToken
            ticket = msgspec.msgpack.decode(self._fernet.decrypt(text), type=ResumeTicket)
        except (InvalidToken, msgspec.MsgspecError):
            message = "the resume ticket is none of this deployment's, or was changed: send it as given"
            raise invalid("resume.ticket", message, "INVALID_TICKET") from None
        if ticket.key != api_key.identity:
            message = "the resume ticket belongs to another API key: send the key that began the request"
            raise BatonError(grpc.StatusCode.PERMISSION_DENIED, "TICKET_OF_OTHER_KEY", message)
        if ticket.expires <= self.now():
            raise failed_precondition(
                "the resumed request's time is over: begin another one", "TICKET_EXPIRED"
            )
        return ticket
