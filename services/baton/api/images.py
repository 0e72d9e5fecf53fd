"""Images in the bodies of requests: files, or addresses; with --omit-images the model is told of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeGuard

from pydantic import Discriminator, Field, PrivateAttr, ValidationInfo, model_validator

from baton.api.openai_errors import invalid_value
from baton.api.openai_fields import Reading, Strict
from baton.pictures.data_uri import from_base64, from_data_uri
from baton.pictures.settings import PictureError
from baton.v1 import tokenizer_pb2

OMITTED = "[An image was here. This model cannot see images.]"
"""What the model reads in the place of an image."""
PART, IMAGE = "[part]", "[image]"
"""Tags of parts that may be images. Their brackets keep them out of the fields that errors name."""
_DETAIL = {"detail": "images are resized as the model wants them"}
_CACHE = {"cache_control": "every prompt finds what is cached of it"}
NonEmpty = Annotated[str, Field(min_length=1)]


class Image(Strict):
    """A part that is an image."""

    _omitted: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _omit(self, info: ValidationInfo) -> Image:
        reading = info.context
        if isinstance(reading, Reading) and reading.omit_images:
            self._take()
            self._omitted = True
            reading.ignored.add(f"{self.FIELD_PATH}.image")
        return self

    @property
    def said(self) -> str:
        """What the model reads in its place; empty: it is shown."""
        return OMITTED if self._omitted else ""

    def show(self, part: tokenizer_pb2.ContentPart, path: str) -> None:
        """Makes `part` the image, which is not kept here. path: of the part in the body. Raises ApiError."""
        source_text = self._take()
        part.name = name = f"{path}.{self._field()}"
        try:
            if source_text.strip()[:6].lower() == "https:":
                part.image_url = source_text.strip()
            else:
                part.image = self._read(source_text)
        except PictureError as error:
            raise invalid_value(name, f"{name} {error}") from None

    def _field(self) -> str:
        """The part's field that holds the image."""
        return "image_url"

    def _take(self) -> str:
        """What it holds; from then on nothing."""
        raise NotImplementedError

    def _read(self, source_text: str) -> bytes:
        """Raises PictureError."""
        return from_data_uri(source_text)


class Address(Strict):
    FIELD_PATH = "messages.content.image_url"
    HINTS: ClassVar[Mapping[str, str]] = _DETAIL

    url: NonEmpty


class ChatImage(Image):
    """In /v1/chat/completions."""

    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = _CACHE

    type: Literal["image_url"]
    image_url: Address

    def _take(self) -> str:
        source_text, self.image_url.url = self.image_url.url, ""
        return source_text


class InputImage(Image):
    """In /v1/responses."""

    FIELD_PATH = "input.content"
    HINTS: ClassVar[Mapping[str, str]] = _DETAIL

    type: Literal["input_image"]
    image_url: NonEmpty

    def _take(self) -> str:
        source_text, self.image_url = self.image_url, ""
        return source_text


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: str
    data: NonEmpty


class UrlSource(Strict):
    type: Literal["url"]
    url: NonEmpty


class ImageBlock(Image):
    """In /v1/messages."""

    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = _CACHE

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]

    def _field(self) -> str:
        return "source"

    def _take(self) -> str:
        source = self.source
        if isinstance(source, UrlSource):
            source_text, source.url = source.url, ""
        else:
            source_text, source.data = source.data, ""
        return source_text

    def _read(self, source_text: str) -> bytes:
        return from_data_uri(source_text) if isinstance(self.source, UrlSource) else from_base64(source_text)


class Saying(Protocol):
    """A part of what a message says."""

    @property
    def said(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Words:
    """A part that is a text."""

    said: str


Pieces = Iterable[tuple[str, Saying]]
"""Parts, each with its path in the body."""


def say(message: tokenizer_pb2.ChatMessage, pieces: Pieces) -> None:
    """Gives the message what it says: a text, or texts and images. Raises ApiError."""
    found = list(pieces)
    if not any(_shown(piece) for _, piece in found):
        message.content = "".join(piece.said for _, piece in found)
        return
    for path, piece in found:
        part = message.parts.add()  # in place: to append one holds the interpreter for several copies of it
        if _shown(piece):
            piece.show(part, path)
        else:
            part.text = piece.said


def _shown(piece: Saying) -> TypeGuard[Image]:
    return isinstance(piece, Image) and not piece.said


def image_or_part(kind: str) -> Discriminator:
    """Parts of type `kind` are images, all others are not."""

    def tag(value: Any) -> str:
        type_here = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
        return IMAGE if type_here == kind else PART

    return Discriminator(tag)
