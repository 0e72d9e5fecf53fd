"""Images in the bodies of requests. No model here sees: they are refused, or the model is told of them.

A body that is read has its image parts checked, and nothing kept of what they show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from baton.api.openai_fields import Reading, Strict

OMITTED = "[An image was here. This model cannot see images.]"
"""What the model reads in the place of an image."""
PART, IMAGE = "[part]", "[image]"
"""Tags of parts that may be images. Their brackets keep them out of the fields that errors name."""
_REFUSAL = (
    "is that of an image, and no model here sees; start the gateway with --omit-images to have the model "
    "told so instead"
)
Pixels = Annotated[str, Field(min_length=1), AfterValidator(lambda given: "")]
"""An image's address, or the image itself. It must be there; it is let go at once."""


class Image(Strict):
    """A part that is an image. Refused unless images are omitted."""

    said: ClassVar[str] = OMITTED

    @model_validator(mode="after")
    def _refuse_or_name(self, info: ValidationInfo) -> Image:
        reading = info.context
        if not (isinstance(reading, Reading) and reading.omit_images):
            raise PydanticCustomError("refused", "{why}", {"field": "type", "why": _REFUSAL})
        reading.ignored.add(f"{self.PLACE}.image")
        return self


class Address(Strict):
    PLACE = "messages.content.image_url"
    HINTS: ClassVar[Mapping[str, str]] = {"detail": "no model here sees"}

    url: Pixels


class ChatImage(Image):
    """In /v1/chat/completions."""

    PLACE = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {"cache_control": "every prompt finds what is cached of it"}

    type: Literal["image_url"]
    image_url: Address


class InputImage(Image):
    """In /v1/responses."""

    PLACE = "input.content"
    HINTS: ClassVar[Mapping[str, str]] = {"detail": "no model here sees"}

    type: Literal["input_image"]
    image_url: Pixels


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: str
    data: Pixels


class UrlSource(Strict):
    type: Literal["url"]
    url: Pixels


class ImageBlock(Image):
    """In /v1/messages."""

    PLACE = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {"cache_control": "every prompt finds what is cached of it"}

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]


def image_or_part(kind: str) -> Discriminator:
    """Parts of type `kind` are images, all others are not."""

    def tag(value: Any) -> str:
        given = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
        return IMAGE if given == kind else PART

    return Discriminator(tag)
