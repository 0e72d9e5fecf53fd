"""gateway.tokenizer_node: which ends of a call mean that the tokenizer is gone: it is asked again."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from baton.gateway.tokenizer_node import TokenizerNode
from baton.rpc.errors import BatonError


@pytest.mark.parametrize(
    ("code", "gone"),
    [("UNAVAILABLE", True), ("DEADLINE_EXCEEDED", True), ("CANCELLED", True), ("INVALID_ARGUMENT", False)],
)
async def test_a_call_that_its_tokenizer_ends(code, gone):
    """CANCELLED: it stops, and cancels what is under way."""
    node = TokenizerNode.__new__(TokenizerNode)  # without a connection
    node.address = "127.0.0.1:1"

    async def call():
        raise AioRpcError(grpc.StatusCode[code], Metadata(), Metadata(), details=code)

    with pytest.raises(BatonError) as ended:
        await node._call(call())
    assert (ended.value.reason == "TOKENIZER_UNAVAILABLE") == gone
    assert ended.value.code is (grpc.StatusCode.UNAVAILABLE if gone else grpc.StatusCode[code])
