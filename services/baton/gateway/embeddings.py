"""Inference.Embed: texts whose embeddings a client wants, over gRPC or HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.authentication.api_keys import ApiKey
from baton.gateway import admission
from baton.gateway.gateway import Gateway
from baton.gateway.recorded_calls import recorded_call
from baton.rpc.errors import BatonError
from baton.v1 import embed_pb2, inference_pb2


async def embed(
    gateway: Gateway, request: inference_pb2.EmbedRequest, api_key: ApiKey
) -> inference_pb2.EmbedResponse:
    """Raises BatonError. Cancelling the task cancels the prompts at the nodes."""
    admission.check_embed(request, gateway.config, gateway.model_or_last())
    began, seconds = time.monotonic(), gateway.config.request_seconds
    if request.HasField("timeout_ms"):
        seconds = request.timeout_ms / 1000
    with recorded_call(gateway, api_key, "embed", computes=True) as call:
        try:
            prompts = await _encode(gateway, request, api_key, seconds)
            call.tokens = sum(map(len, prompts))
            template = _template(request, gateway.model().fingerprint)
            embeddings = await gateway.embedder.compute(prompts, template, began + seconds)
        except BatonError as error:
            if error.field is not None and error.field.startswith("["):
                error.field = f"inputs{error.field}"
            raise
    return inference_pb2.EmbedResponse(embeddings=embeddings, request_id=call.name)


def _template(request: inference_pb2.EmbedRequest, fingerprint: str) -> embed_pb2.EmbedPrompts:
    template = embed_pb2.EmbedPrompts(
        pooling=request.pooling, namespace=request.namespace, fingerprint=fingerprint
    )
    for field in ("normalize", "dimensions", "priority"):
        if request.HasField(field):
            setattr(template, field, getattr(request, field))
    return template


async def _encode(
    gateway: Gateway, request: inference_pb2.EmbedRequest, api_key: ApiKey, seconds: float
) -> list[Sequence[int]]:
    """The token ids of all inputs."""
    numbers = [i for i, each in enumerate(request.inputs) if each.WhichOneof("kind") == "text"]
    try:
        texts = await gateway.tokenizer.encode_texts([request.inputs[i].text for i in numbers], seconds)
    except BatonError as error:
        if error.field is not None:
            error.field = f"[{numbers[int(error.field[1:-1])]}]"
        raise
    encoded = dict(zip(numbers, texts, strict=True))
    prompts: list[Sequence[int]] = []
    model = gateway.model_or_last()
    for index, each in enumerate(request.inputs):
        prompt = encoded[index] if index in encoded else list(each.tokens.token_ids)
        field = f"inputs[{index}]"
        api_key.check_prompt(len(prompt), field)
        if index in encoded:
            admission.check_embedded(prompt, model, field)
        prompts.append(prompt)
    return prompts
