"""Content blocks of /v1/messages, and what the model reads in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Field, Tag

from baton.api.images import IMAGE, PART, ImageBlock, Saying, Words, image_or_part
from baton.api.openai_fields import Elements, LeftOut, Strict

BREAK = "\n\n"
"""Behind a document: what follows is not a part of it."""
CACHE = {"cache_control": "every prompt finds what is cached of it"}


class TextBlock(Strict):
    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {**CACHE, "citations": "are the client's own record"}

    type: Literal["text"]
    text: str

    @property
    def said(self) -> str:
        return self.text


TextOrImage = Annotated[
    Annotated[TextBlock, Tag(PART)] | Annotated[ImageBlock, Tag(IMAGE)], image_or_part("image")
]


class TextSource(Strict):
    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ContentSource(Strict):
    type: Literal["content"]
    content: str | Elements[TextOrImage]


class Document(Strict):
    """A text that was a file, with its title and what is said about it before it."""

    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {**CACHE, "citations": "the model gives none"}

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None

    def pieces(self, path: str) -> Iterator[tuple[str, Saying]]:
        source = self.source
        if head := "\n".join(filter(None, (self.title, self.context))):
            yield path, Words(f"{head}\n")
        content = source.data if isinstance(source, TextSource) else source.content
        yield from pieces(content, f"{path}.source")
        yield path, Words(BREAK)


class SearchResult(Strict):
    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {**CACHE, "citations": "the model gives none"}

    type: Literal["search_result"]
    source: str
    title: str
    content: Elements[TextBlock]

    @property
    def said(self) -> str:
        return f"{self.title}\n{self.source}\n{said(self.content)}{BREAK}"


class ToolReference(Strict):
    """A tool that a search for tools has found. All tools are shown to the model: its name says which."""

    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = CACHE

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def said(self) -> str:
        return f"{self.tool_name}\n"


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return kind if isinstance(kind, str) and kind else "text"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[Document, Tag("document")]
    | Annotated[SearchResult, Tag("search_result")]
    | Annotated[ToolReference, Tag("tool_reference")],
    Discriminator(_kind),
]


class ToolUse(Strict):
    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {**CACHE, "caller": "is the client's own record"}

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Strict):
    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {
        **CACHE,
        "is_error": "no template here shows it: say it in the content",
    }

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Elements[ResultBlock] | None = None


class Thinking(Strict):
    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {"signature": "thinking is not signed here"}

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Strict):
    FIELD_PATH = "messages.content"
    HINTS: ClassVar[Mapping[str, str]] = {"data": "no model here can read it"}

    type: Literal["redacted_thinking"]


class LeftOutBlock(LeftOut):
    FIELD_PATH = "messages.content"

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
    ]


_LEFT_OUT = frozenset(get_args(LeftOutBlock.model_fields["type"].annotation))


def _kind_or_left_out(value: Any) -> str:
    kind = _kind(value)
    return "server_tool_use" if kind in _LEFT_OUT else kind


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[Document, Tag("document")]
    | Annotated[SearchResult, Tag("search_result")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")]
    | Annotated[LeftOutBlock, Tag("server_tool_use")],
    Discriminator(_kind_or_left_out),
]

Said = TextBlock | ImageBlock | Document | SearchResult | ToolReference
"""Blocks that are text or an image to the model."""


def pieces(content: str | Sequence[Said] | None, path: str) -> Iterator[tuple[str, Saying]]:
    """What is said, part by part. path: of what has the content, in the body."""
    if content is None or isinstance(content, str):
        yield path, Words(content or "")
        return
    for index, block in enumerate(content):
        yield from block_pieces(block, f"{path}.content[{index}]")


def block_pieces(block: Said, path: str) -> Iterator[tuple[str, Saying]]:
    if isinstance(block, Document):
        yield from block.pieces(path)
    else:
        yield path, block


def said(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.said for block in content)
