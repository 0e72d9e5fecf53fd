"""The tokens of a chat that is not run: for counting them, and for `/tokenize`."""

from __future__ import annotations

import asyncio

from baton.authentication.api_keys import ApiKey
from baton.gateway.pictures import PictureLease
from baton.gateway.prompt_images import find_images, read_images, with_images, without_files
from baton.gateway.shell import GatewayShell
from baton.rpc.errors import deadline_exceeded
from baton.v1 import inference_pb2, tokenizer_pb2


async def encode_chat(
    gateway: GatewayShell,
    start: inference_pb2.GenerateStart,
    api_key: ApiKey,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """The tokens of a chat that is not run, its images' included. Raises BatonError."""
    lease, seconds = (
        PictureLease(gateway.pictures, api_key.owner, start.namespace),
        gateway.config.request_seconds,
    )
    try:
        async with asyncio.timeout(seconds):
            parts = await find_images(start.chat)
            images = await read_images(parts, gateway.model(), lease) if parts else []
    except TimeoutError:
        raise deadline_exceeded(f"the images were not read within {seconds:g} s") from None
    finally:
        lease.release()
    encode_input = tokenizer_pb2.EncodeInput(chat=without_files(start.chat, images))
    if add_special_tokens is not None:
        encode_input.add_special_tokens = add_special_tokens
    encoded = await gateway.tokenizer.encode(encode_input, seconds)
    return with_images(encoded.token_ids, encoded.images, images)[0]
