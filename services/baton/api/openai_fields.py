"""What all models of HTTP bodies have in common, and the types of their fields.

Strict: an unknown field or a wrong JSON type is an error that names the field. Three rules besides:

- An explicit null is absence.
- What would change the answer and is not supported is refused, in words of ours (`REFUSED`).
- What is only a hint or an annotation is accepted (`HINTS`), and named in the response header
  x-baton-ignored, so that nothing is ignored in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from baton.tokenizer.conversation import earlier_arguments

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
TopK = Annotated[Int32, AfterValidator(lambda value: 0 if value == -1 else value)]
"""-1 is all tokens to vLLM and SGLang, as 0 is here."""
T = TypeVar("T")
Elements = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first wrong element."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""Negative seeds, which OpenAI allows, count modulo 2**64."""


Json = dict[str, Any]
"""A JSON object."""


@dataclass(slots=True)
class Reading:
    """State of reading one body, passed as pydantic's context."""

    omit_images: bool = False
    ignored: set[str] = field(default_factory=set)
    """Fields that were given and have no effect here."""
    dropped: set[str] = field(default_factory=set)
    """Types of tools that the model is not shown."""


def call_arguments(path: str) -> AfterValidator:
    """Names arguments of an earlier call that are no JSON object: the model sees them as one string."""

    def check(text: str, info: ValidationInfo) -> str:
        if isinstance(info.context, Reading) and earlier_arguments(text) is None:
            info.context.ignored.add(path)
        return text

    return AfterValidator(check)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    FIELD_PATH: ClassVar[str] = ""
    """Where the object stands in a body, for x-baton-ignored."""
    HINTS: ClassVar[Mapping[str, str]] = {}
    """Fields that are accepted and have no effect here, and why they need none."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Known fields that are refused, but for false, "" and []: what the error says after their name."""

    @model_validator(mode="before")
    @classmethod
    def _take_apart(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if (
            None not in value.values()
            and cls.HINTS.keys().isdisjoint(value)
            and cls.REFUSED.keys().isdisjoint(value)
        ):
            return value
        kept = {}
        for key, each in value.items():
            if each is None:
                continue
            if key in cls.HINTS:
                if isinstance(info.context, Reading):
                    info.context.ignored.add(f"{cls.FIELD_PATH}.{key}" if cls.FIELD_PATH else key)
            elif key not in cls.REFUSED:
                kept[key] = each
            elif each is not False and each not in ("", []):  # {} is any JSON, or switches something on
                raise PydanticCustomError("refused", "{why}", {"field": key, "why": cls.REFUSED[key]})
        return kept


class DroppedTool(BaseModel):
    """A tool of a type that is not served: the model is not shown it, and the answer says so."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Annotated[str, Field(min_length=1)]

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> DroppedTool:
        if isinstance(info.context, Reading):
            info.context.dropped.add(re.sub(r"[^a-zA-Z0-9_.-]", "_", self.type[:64]))
        return self


class LeftOut(BaseModel):
    """A trace in a history of what a server did on its own. Its outcome is in the answer that followed."""

    model_config = ConfigDict(strict=True, extra="ignore")

    FIELD_PATH: ClassVar[str]

    type: str

    @model_validator(mode="after")
    def _note(self, info: ValidationInfo) -> LeftOut:
        if isinstance(info.context, Reading):
            info.context.ignored.add(f"{self.FIELD_PATH}.{self.type}")
        return self
