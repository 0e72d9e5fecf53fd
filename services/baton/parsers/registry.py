"""Parsers by name, as the tokenizer tells them from the chat template (`baton.tokenizer.output_formats`)."""

from __future__ import annotations

from baton.config import GatewayConfig
from baton.parsers.deepseek import DeepSeek
from baton.parsers.glm import Glm
from baton.parsers.gpt_oss import GptOss
from baton.parsers.hermes import Hermes, Qwen3Coder
from baton.parsers.llama import Llama3Json, Pythonic
from baton.parsers.mistral import Mistral
from baton.parsers.reader import Reader
from baton.parsers.think import Think
from baton.parsers.tools import ToolParser, ToolSchemas
from baton.rpc.errors import invalid

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
    "pythonic": Pythonic,
    "mistral": Mistral,
    "deepseek": DeepSeek,
    "glm": Glm,
    "gpt_oss": GptOss,
}
REASONING_PARSERS = ("think", "gpt_oss")
NONE = "none"
"""Calls, or reasoning, stay text."""


def make_parser(
    tool_format: str, reasoning_format: str, tools: ToolSchemas, *, opened: bool
) -> Reader | None:
    """A parser of one output; None: all of it is the answer. opened: the prompt ends with the mark that
    begins the reasoning. Without tools no call is looked for."""
    if "gpt_oss" in (reasoning_format, tool_format if tools else ""):
        return GptOss(tools)  # its calls and its reasoning come in one form
    parser = TOOL_PARSERS[tool_format](tools) if tools and tool_format in TOOL_PARSERS else None
    return Think(parser, opened=opened) if reasoning_format == "think" else parser


def check_names(config: GatewayConfig) -> None:
    """Raises BatonError."""
    for name, known in (
        ("generation_config", ("auto", NONE)),
        ("tool_parser", ("auto", NONE, *TOOL_PARSERS)),
        ("reasoning_parser", ("auto", NONE, *REASONING_PARSERS)),
    ):
        parser = getattr(config, name)
        if parser not in known:
            flag = f"--{name.replace('_', '-')}"
            raise invalid(name, f"{flag} {parser!r} is not known; use one of {', '.join(known)}")
