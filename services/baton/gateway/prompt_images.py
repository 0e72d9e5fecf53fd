"""Images of a chat prompt: which they are, and where their tokens stand in the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.gateway.pictures import WIDTH, PictureLease
from baton.kvcache.page_keys import DIGEST_BYTES, placeholder
from baton.pictures.settings import PictureSettings
from baton.rpc.errors import BatonError, invalid, invalid_field
from baton.v1 import common_pb2, node_pb2, tokenizer_pb2

MOST_IMAGES = 256
"""Images of a prompt."""
MOST_NAME = 256
"""Characters of ContentPart.name."""
NOT_SEEN = "is an image, and no model here sees; start the gateway with --omit-images to have it told so"
"""What the error says after an image's name."""


ImageParts = Sequence[tuple[str, tokenizer_pb2.ContentPart]]
"""Each with its name for errors, in order."""
MANY_MESSAGES = 2048
"""To go through so many takes a millisecond."""


def image_parts(chat: tokenizer_pb2.ChatPrompt) -> ImageParts:
    """The chat's parts that are images."""
    return list(_image_parts(chat))


def _image_parts(chat: tokenizer_pb2.ChatPrompt) -> Iterator[tuple[str, tokenizer_pb2.ContentPart]]:
    for number, message in enumerate(chat.messages):
        if not (parts := message.parts):
            continue
        for index, part in enumerate(parts):
            if part.WhichOneof("kind") not in (None, "text"):
                yield part.name or f"chat.messages[{number}].parts[{index}]", part


async def find_images(chat: tokenizer_pb2.ChatPrompt) -> ImageParts:
    """`image_parts`, in a thread where there are many messages."""
    if len(chat.messages) > MANY_MESSAGES:
        return await asyncio.to_thread(image_parts, chat)
    return image_parts(chat)


def check_images(parts: ImageParts, model: node_pb2.ModelInfo | None) -> None:
    """Raises BatonError for what can be refused without looking at them. model None: it is not known yet."""
    for count, (field_path, part) in enumerate(parts, 1):
        if len(part.name) > MOST_NAME:
            raise invalid("chat.messages", f"a part's name has more than {MOST_NAME} characters")
        if model is not None and not model.HasField("image_settings"):
            raise invalid_field(field_path, NOT_SEEN, "NO_IMAGES")
        if count > MOST_IMAGES:
            raise invalid_field(
                field_path, f": more than {MOST_IMAGES} images in a request", "TOO_MANY_IMAGES"
            )
        if part.WhichOneof("kind") == "image_digest" and len(part.image_digest) != DIGEST_BYTES:
            raise invalid_field(field_path, f": a digest has {DIGEST_BYTES} bytes", "IMAGE")


@dataclass(frozen=True, slots=True)
class ImageSize:
    """An image that is known."""

    digest: bytes
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


async def read_images(parts: ImageParts, model: node_pb2.ModelInfo, lease: PictureLease) -> list[ImageSize]:
    """A chat's images, which `lease` holds from now on. Their parts keep their files' digests alone. Raises
    BatonError."""
    check_images(parts, model)
    image_settings = model.image_settings
    settings = PictureSettings(
        image_settings.patch, image_settings.merge, image_settings.least_pixels, image_settings.most_pixels
    )

    async def read(field_path: str, part: tokenizer_pb2.ContentPart) -> ImageSize:
        kind = part.WhichOneof("kind")
        known = kind == "image_digest"
        file, part.image_digest = getattr(part, kind), b""
        if kind == "image_url":
            picture, part.image_digest = await lease.fetch(file, settings, field_path)
        else:
            picture, part.image_digest = await lease.add(file, settings, field_path, known=known)
        high, wide = picture.pixels.shape[:2]
        return ImageSize(picture.digest, high // settings.factor, wide // settings.factor)

    found: list[ImageSize] = []
    for first in range(0, len(parts), WIDTH):
        some = [read(field_path, part) for field_path, part in parts[first : first + WIDTH]]
        for each in await asyncio.gather(*some, return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
            found.append(each)
        tokens = sum(each.tokens for each in found)
        if tokens > model.context_length:  # before all others are decoded
            raise context_of_images(tokens, model.context_length, parts[len(found) - 1][0])
    return found


def without_files(chat: tokenizer_pb2.ChatPrompt, images: Sequence[ImageSize]) -> tokenizer_pb2.ChatPrompt:
    """The chat, whose images have been read, without the memory that their files had."""
    if not images:
        return chat
    copied = tokenizer_pb2.ChatPrompt()
    copied.CopyFrom(chat)
    return copied


def with_images(
    token_ids: Sequence[int], at: Sequence[int], images: Sequence[ImageSize]
) -> tuple[list[int], list[common_pb2.PromptImage]]:
    """A rendered prompt with as many tokens for each image as it has, and where they are. at: indices of the
    tokens that stand for them. Raises BatonError if these are not as many as images."""
    if len(at) != len(images):
        text = f": the model's chat template shows {len(at)} of {len(images)} images"
        raise invalid_field("chat.messages", text, "TEMPLATE")
    found: list[int] = []
    spans = []
    done = 0
    for index, image in zip(at, images, strict=True):
        found += token_ids[done:index]
        spans.append(
            common_pb2.PromptImage(
                start=len(found), rows=image.rows, columns=image.columns, digest=image.digest
            )
        )
        found += [token_ids[index]] * image.tokens
        done = index + 1
    found += token_ids[done:]
    return found, spans


def keyed(token_ids: Sequence[int], images: Sequence[common_pb2.PromptImage]) -> Sequence[int]:
    """The prompt as prefix trees know it, whose placeholders name their images."""
    if not images:
        return token_ids
    found = list(token_ids)
    for image in images:
        first = placeholder(image.digest, 0)
        count = image.rows * image.columns
        found[image.start : image.start + count] = range(first, first + count)
    return found


def context_of_images(tokens: int, context_length: int, field_path: str) -> BatonError:
    text = f": images up to here take {tokens} tokens; the context holds {context_length}"
    return invalid_field(field_path, text, "PROMPT_TOO_LONG")
