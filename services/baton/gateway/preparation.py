"""From a request's `start` to what its attempts need: the encoded prompt, sampling parameters, parsers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.authentication.api_keys import ApiKey
from baton.gateway import admission
from baton.gateway.metrics import RequestTimer
from baton.gateway.parsed_output import OutputParsers
from baton.gateway.pictures import PictureLease
from baton.gateway.prompt_images import ImageSize, find_images, read_images
from baton.gateway.prompts import EncodedPrompt, GatewaySession, encode_prompt
from baton.gateway.shell import GatewayShell
from baton.rpc.validate import require_grammars
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, decode_pb2, inference_pb2, tokenizer_pb2, trace_pb2


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt: EncodedPrompt
    vocabulary: Vocabulary
    fingerprint: str
    """Fingerprint of the model that the prompt was encoded for."""
    sampling: common_pb2.SamplingParams
    outputs: OutputParsers | None
    """None: the output is plain text."""
    grammar_field: str
    """What the client has given that the grammar comes from."""
    pictures: str
    """host:port where workers fetch the prompt's images; empty: there are none."""

    def fill(self, start: decode_pb2.DecodeStart) -> None:
        """Adds copies: any part of a message keeps the whole message alive."""
        start.sampling.CopyFrom(self.sampling)
        start.images.extend(self.prompt.images)
        start.pictures = self.pictures


async def prepare(
    gateway: GatewayShell,
    start: inference_pb2.GenerateStart,
    session: GatewaySession | None,
    api_key: ApiKey,
    timing: RequestTimer,
    name: trace_pb2.RequestName,
    traceparent: str,
    tokenizing: Callable[[str], None],
    tokenized: Callable[[int], None],
    lease: PictureLease,
) -> Prepared:
    """Encodes the prompt, and checks what can be checked only then. Raises BatonError.

    tokenizing: called with the tokenizer's address when the prompt is sent there; tokenized: with the
    prompt's number of tokens. lease: holds the prompt's images.
    """

    async def read(chat: tokenizer_pb2.ChatPrompt) -> list[ImageSize]:
        parts = await find_images(chat)
        if not parts:
            return []
        timing.begin_phase("images")
        return await read_images(parts, gateway.model(), lease)

    prompt = await encode_prompt(
        start, session, gateway.tokenizer, timing.remaining, name, traceparent, tokenizing, read
    )
    tokenized(len(prompt.token_ids))
    pictures = await gateway.pictures_address() if prompt.images else ""
    vocabulary = await gateway.tokenizer.ready(timing.remaining)
    model = gateway.model_or_last()
    if model is None:
        raise gateway.no_decode_node()
    api_key.check_prompt(len(prompt.token_ids), prompt.field)
    length, context = len(prompt.token_ids), model.context_length
    clamp = bool(gateway.config.clamp_max_tokens)
    if start.HasField("clamp_max_tokens"):
        clamp = start.clamp_max_tokens
    defaults = model.default_sampling
    sampling = admission.fit(start.sampling, length, context, prompt.field, defaults, clamp=clamp)
    outputs, field = None, "sampling.grammar"
    if start.HasField("chat") and not start.raw_output:
        outputs = OutputParsers(start.chat, prompt.end, model)
        outputs.constrain(sampling, vocabulary)
        if not start.sampling.HasField("grammar"):
            field = "chat.tools"
        require_grammars(sampling, model.grammars)
    return Prepared(prompt, vocabulary, model.fingerprint, sampling, outputs, field, pictures)
