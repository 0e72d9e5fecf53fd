"""Images in messages, and as the engine takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.kvcache.page_keys import DIGEST_BYTES, is_placeholder
from baton.rpc.errors import failed_precondition, invalid, invalid_field
from baton.v1 import common_pb2, decode_pb2, node_pb2, prefill_pb2

MAX_IMAGES = 256
MAX_ENCODERS = 16
"""That a request may name."""
_Start = decode_pb2.DecodeStart | prefill_pb2.PrefillStart


def check_images(start: _Start, info: node_pb2.ModelInfo) -> None:
    """Raises BatonError naming the field."""
    if not start.images:
        return
    check_spans(start.images, len(start.token_ids) - start.delivered, info)
    if not start.pictures:
        raise invalid_field("pictures", "is empty: it names who has the images' pixels, as host:port")
    if len(start.encoders) > MAX_ENCODERS:
        raise invalid_field("encoders", f"has {len(start.encoders)} entries; at most {MAX_ENCODERS}")
    if start.sampling.HasField("prompt_logprobs"):
        text = "prompt_logprobs is not for prompts with images: placeholders are not predicted"
        raise invalid("sampling.prompt_logprobs", text)


def check_spans(
    images: Sequence[common_pb2.PromptImage], tokens: int, info: node_pb2.ModelInfo, cut: bool = False
) -> None:
    """`tokens`: those of the prompt; `cut`: of its beginning, where the last image may reach further. Raises
    BatonError naming the field."""
    if images and not info.images:
        text = "this node computes no images: its model sees none, or several GPUs compute it"
        raise failed_precondition(text, "NO_IMAGES")
    if len(images) > MAX_IMAGES:
        raise invalid_field("images", f"has {len(images)} entries; at most {MAX_IMAGES} are allowed")
    end = 0
    for index, image in enumerate(images):
        field = f"images[{index}]"
        if len(image.digest) != DIGEST_BYTES:
            text = f"has {len(image.digest)} bytes; a digest has {DIGEST_BYTES}"
            raise invalid_field(f"{field}.digest", text)
        if not (image.rows and image.columns):
            raise invalid(f"{field}.rows", f"{field} has no placeholders: rows and columns are at least 1")
        if image.start < end:
            text = f"is {image.start}, inside of the image before it or in the wrong order"
            raise invalid_field(f"{field}.start", text)
        end = image.start + image.rows * image.columns
        if (image.start if cut else end - 1) >= tokens:
            raise invalid(f"{field}.start", f"{field} ends behind the prompt's {tokens} tokens")


def spans_from(images: Iterable[common_pb2.PromptImage]) -> tuple[ImageSpan, ...]:
    """Spans of checked images."""
    return tuple(ImageSpan(each.start, each.rows, each.columns, each.digest) for each in images)


def source_from(start: _Start) -> ImageSource | None:
    return ImageSource(start.pictures, tuple(start.encoders)) if start.images else None


def images_to(spans: Iterable[ImageSpan]) -> list[common_pb2.PromptImage]:
    return [
        common_pb2.PromptImage(start=each.start, rows=each.rows, columns=each.columns, digest=each.digest)
        for each in spans
    ]


def plain_tokens(tokens: Sequence[int], images: Sequence[ImageSpan]) -> Sequence[int]:
    """Token ids for a message: any will do where images say what is there."""
    if not images:
        return tokens
    return [0 if is_placeholder(token) else token for token in tokens]
