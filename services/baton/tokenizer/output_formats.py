"""How a model writes reasoning and tool calls, told from its chat template.

A template shows earlier turns in the form that the model was trained to write, so its marks name the form.
"""

from __future__ import annotations

import re

from jinja2 import Environment, TemplateSyntaxError, meta

_TOOL_FORMATS = (
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("tool▁calls▁begin", "deepseek"),
    ("<|constrain|>", "gpt_oss"),
    ("to=functions.", "gpt_oss"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
"""A mark, and the form that it belongs to; the first that occurs counts."""
_REASONING_FORMATS = (("<|channel|>", "gpt_oss"), ("[THINK]", "think"), ("</think>", "think"))


def knows_tools(template: str) -> bool:
    """The template reads the variable `tools`."""
    return "tools" in template


def tool_format(template: str) -> str:
    """The name of a parser; "" if the template's marks are none that are known. A template that knows no
    tools gets them in the Hermes format (`conversation`)."""
    if not knows_tools(template):
        return "hermes"
    return next((name for mark, name in _TOOL_FORMATS if mark in template), "")


def reasoning_format(template: str) -> str:
    """The name of a parser; "" if the template has no marks of reasoning that are known."""
    return next((name for mark, name in _REASONING_FORMATS if mark in template), "")


def variables(template: str) -> list[str]:
    """Names that the template reads without setting them, sorted; where it has tags that Jinja itself does
    not know, all names in it."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError:
        return sorted(set(re.findall(r"\b[a-zA-Z_]\w*", template)))
    return sorted(meta.find_undeclared_variables(parsed))
