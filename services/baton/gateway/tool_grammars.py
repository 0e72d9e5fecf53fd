"""Grammars that hold a chat's output to its tools: a call is required, functions are strict, or an answer
has a schema.

A grammar is in Lark's syntax, as llguidance reads it (https://github.com/guidance-ai/llguidance,
docs/syntax.md): reasoning, if the model may reason; then calls in the form that the model's parser reads, or
an answer. Marks that are special tokens are named by their ids. Of formats whose arguments are plain text
the parsers read JSON as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from baton.grammar.json_literals import WHITESPACE, as_lark, dumps
from baton.grammar.json_schema import Rewritten, SchemaError, rewrite
from baton.parsers.deepseek import BEGIN, CALL, CALL_END, END, SEP
from baton.parsers.gpt_oss import GPT_OSS_MARKS
from baton.parsers.hermes import CLOSE, OPEN
from baton.parsers.llama import WholeAnswer
from baton.parsers.registry import TOOL_PARSERS
from baton.parsers.think import Think
from baton.parsers.tools import NAME
from baton.rpc.errors import BatonError, invalid_field
from baton.rpc.validate import MAX_GRAMMAR_BYTES
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, tokenizer_pb2

MAX_CALLS = 16
"""In an answer that must call tools."""
_DEFINITIONS = ("$defs.", "definitions.", "components.")
_SPACE = {"whitespace_pattern": WHITESPACE}


def callable_tools(chat: tokenizer_pb2.ChatPrompt) -> list[tokenizer_pb2.Tool]:
    """The tools that an answer may call."""
    choice = chat.tool_choice
    if choice.mode == tokenizer_pb2.ToolChoice.MODE_NONE:
        return []
    names = {choice.name} if choice.name else set(choice.allowed)
    return [tool for tool in chat.tools if not names or tool.name in names]


def most_calls(chat: tokenizer_pb2.ChatPrompt) -> int:
    """In an answer; 0: any number."""
    if chat.HasField("parallel_tool_calls"):
        return 0 if chat.parallel_tool_calls else 1
    return 1 if chat.tool_choice.name else 0


def unenforced(chat: tokenizer_pb2.ChatPrompt) -> set[str]:
    """Keywords of schemas that an answer is not held to which must call a tool, as `tools.NAME.KEYWORD`."""
    found: set[str] = set()
    if chat.tool_choice.mode != tokenizer_pb2.ToolChoice.MODE_REQUIRED:
        return found
    for tool in callable_tools(chat):
        if tool.parameters and not tool.strict and NAME.fullmatch(tool.name):
            with suppress(BatonError):  # which `constrain` raises
                found |= {f"tools.{tool.name}.{keyword}" for keyword in _rewritten(tool).unenforced}
    return found


def constrain(
    chat: tokenizer_pb2.ChatPrompt,
    sampling: common_pb2.SamplingParams,
    vocabulary: Vocabulary,
    formats: tuple[str, str],
    *,
    reasons: bool,
    opened: bool,
) -> common_pb2.Grammar | None:
    """The grammar of a chat's whole output; None: its own, if it has one, is all.

    formats: of tool calls and reasoning. reasons: the model may reason; opened: its prompt ends with the
    mark that begins the reasoning. Raises BatonError.
    """
    mode = chat.tool_choice.mode
    required = mode == tokenizer_pb2.ToolChoice.MODE_REQUIRED
    tools = callable_tools(chat)
    held = any(tool.strict for tool in tools) or bool(chat.tool_choice.allowed)
    answer = sampling.grammar if sampling.HasField("grammar") and not required else None
    if not (required or held or (answer is not None and (tools or reasons))):
        return None
    if sampling.ignore_eos:
        text = "cannot be true beside tools that must be called in their form"
        raise invalid_field("sampling.ignore_eos", text)
    if sum(len(tool.parameters) for tool in tools) > MAX_GRAMMAR_BYTES:
        text = f": their schemas have more than the {MAX_GRAMMAR_BYTES} bytes that can be enforced"
        raise invalid_field("chat.tools", text)
    writer = _GrammarWriter(vocabulary, tools, loose=not required)
    most = most_calls(chat) or MAX_CALLS
    lines = writer.write(formats, most, required, answer, reasons=reasons, opened=opened)
    return common_pb2.Grammar(lark="\n".join(lines))


class _GrammarWriter:
    """loose: only strict functions are held to their schemas."""

    def __init__(self, vocabulary: Vocabulary, tools: Sequence[tokenizer_pb2.Tool], *, loose: bool) -> None:
        self._special = {vocabulary.bytes_of(token): token for token in vocabulary.special}
        self._tools = tools
        self._schemas = [_schema(tool, any_object=loose and not tool.strict) for tool in tools]

    def write(
        self,
        formats: tuple[str, str],
        most: int,
        required: bool,
        answer: common_pb2.Grammar | None,
        *,
        reasons: bool,
        opened: bool,
    ) -> list[str]:
        gpt_oss = "gpt_oss" in formats
        lines = []
        if self._tools:
            lines += self._calls(formats[0], most)
        if answer is not None:
            lines += _answer(answer)
            if gpt_oss:
                lines.append(f"final: {self._mark('<|channel|>', 'final', '<|message|>')} answer")
            body = ("final" if gpt_oss else "answer") + (" | calls" if self._tools else "")
        elif required:
            body = "calls"
        else:
            lines += self._free(formats[0])
            body = "free"
        lines.append(f"body: {body}")
        if not reasons:
            return ["start: body", *lines]
        if gpt_oss:
            read, more = self._up_to("thought", "<|end|>", GPT_OSS_MARKS)
            thought = f"{self._mark('<|channel|>', 'analysis', '<|message|>')} {read}"
            return [f"start: ({thought} {self._mark('<|start|>', 'assistant')})? body", *lines, *more]
        thought, more = self._reasoning(opened)
        return [f"start: ({thought} SPACE?){'' if opened else '?'} body", *lines, *more, r"SPACE: /\s{1,8}/"]

    def _reasoning(self, opened: bool) -> tuple[str, list[str]]:
        """What reads reasoning as its parser does, and the lines that it needs: up to the mark that
        belongs to the one that it began with, or, if that is in the prompt, to any. Marks may be spelled."""
        thoughts, lines, ends = [], [], [end for _, end in Think.MARKS]
        for number, (begin, end) in enumerate(Think.MARKS):
            read, more = self._up_to(f"thought_{number}", end, ends if opened else [end])
            thoughts.append(read if opened else f"{self._mark(begin)} {read}")
            lines += more
        return f"({' | '.join(thoughts)})", lines

    def _mark(self, *texts: str) -> str:
        """Texts one after the other; one that is a special token stands for that token."""
        parts = []
        for text in texts:
            token = self._special.get(text.encode())
            parts.append(f"<[{token}]>" if token is not None else _literal(text))
        return " ".join(parts)

    def _each(self, form: Callable[[str, str], str]) -> list[str]:
        """The rule `call`: any of the tools. form: how a call of this name is written, with these
        arguments."""
        rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(self._tools)))}"]
        for number, (tool, schema) in enumerate(zip(self._tools, self._schemas, strict=True)):
            rules += [f"call_{number}: {form(tool.name, f'args_{number}')}", f"args_{number}: %json {schema}"]
        return rules

    def _calls(self, form: str, most: int) -> list[str]:
        """The rule `calls`: one or more."""

        def several(one: str, between: str = "") -> str:
            return f"{one} ({between} {one}){{0,{most - 1}}}" if most > 1 else one

        def named(key: str) -> Callable[[str, str], str]:
            def write(name: str, arguments: str) -> str:
                return f'{_literal(f"""{{"name": {json.dumps(name)}, "{key}": """)} {arguments} "}}"'

            return write

        if form == "llama3_json":
            return [f"calls: {several('call', _literal('; '))}", *self._each(named("parameters"))]
        if form == "pythonic":
            return [f"calls: {several('call', _literal('; '))}", *self._each(named("arguments"))]
        if form == "mistral":
            mark = self._mark("[TOOL_CALLS]")
            if b"[ARGS]" in self._special:
                args = self._mark("[ARGS]")
                each = self._each(lambda name, arguments: f"{_literal(name)} {args} {arguments}")
                return [f"calls: {several(f'{mark} call')}", *each]
            listed = several("call", _literal(", "))
            return [f'calls: {mark} "[" {listed} "]"', *self._each(named("arguments"))]
        if form == "deepseek":
            end = f"{_literal(chr(10) + '```')} {self._mark(CALL_END)}"
            begin = self._mark(CALL, "function", SEP)

            def fenced(name: str, arguments: str) -> str:
                return f"{begin} {_literal(name + chr(10) + '```json' + chr(10))} {arguments} {end}"

            return [f"calls: {self._mark(BEGIN)} {several('call')} {self._mark(END)}", *self._each(fenced)]
        if form == "gpt_oss":
            between = self._mark("<|call|>", "<|start|>", "assistant")

            def message(name: str, arguments: str) -> str:
                header = (f" to=functions.{name}", "<|channel|>", "commentary json", "<|message|>")
                return f"{self._mark(*header)} {arguments}"

            return [f"calls: {several('call', between)}", *self._each(message)]
        block = f"{self._mark(OPEN)} {_literal(chr(10))} call {_literal(chr(10))} {self._mark(CLOSE)}"
        return [
            f"calls: {several('block', _literal(chr(10)))}",
            f"block: {block}",
            *self._each(named("arguments")),
        ]

    def _free(self, form: str) -> list[str]:
        """The rule `free`: any text, in which what the parser reads as a call has the form of the tools."""
        if form == "gpt_oss":
            other = self._mark("<|channel|>", "analysis"), self._mark("<|channel|>", "commentary")
            message, last = self._mark("<|message|>"), self._mark("<|channel|>", "final", "<|message|>")
            said, lines = self._up_to("said", "<|end|>", GPT_OSS_MARKS)
            between = self._mark("<|start|>", "assistant")
            return [
                "free: other* (final | calls)",
                f"other: ({' | '.join(other)}) {message} {said} {between}",
                f"final: {last} FINAL",
                f"FINAL: {_without(GPT_OSS_MARKS)}",
                *lines,
            ]
        parser = TOOL_PARSERS[form]
        mark, marks = parser.MARKS[0], parser.MARKS
        before, lines = self._up_to("before", mark, marks)
        if issubclass(parser, WholeAnswer):
            # Nothing follows the calls: the parser would go on with them after a semicolon or a comma.
            first = "".join(map(re.escape, parser.FIRST))
            opening, more = self._up_to("opening", mark, marks, rf"\s*([^{first}\s](?s:.*))?")
            start = rf"\s*([^{first}\s](?s:.*))?"
            free = f"free: OPENING | {opening} calls | GAP? calls"
            return [free, f"OPENING: {_without(marks, start)}", r"GAP: /\s+/", *more]
        rest = f"rest: {self._rest(form)}"
        return [f"free: ({before} rest)* TAIL", f"TAIL: {_without(marks)}", rest, *lines]

    def _rest(self, form: str) -> str:
        """What follows the mark of calls in a free answer."""
        if form == "mistral":
            return "call" if b"[ARGS]" in self._special else '"[" call (", " call)* "]"'
        if form == "deepseek":
            return f"call+ {self._mark(END)}"
        return f"{_literal(chr(10))} call {_literal(chr(10))} {self._mark(CLOSE)}"

    def _up_to(
        self, name: str, mark: str, marks: Sequence[str], text: str = "(?s:.*)"
    ) -> tuple[str, list[str]]:
        """What reads a text that has none of the marks, and then the mark; and the lines that it needs."""
        upper = name.upper()
        if mark.encode() in self._special:
            return f"{upper}_TEXT {self._mark(mark)}", [f"{upper}_TEXT: {_without(marks, text)}"]
        # A lexer that is greedy would read beyond the mark.
        others = [each for each in marks if each != mark]
        pattern = f"/{text}{_pattern(mark)}/"
        if others:
            pattern += f" & ~/(?s:.*)({'|'.join(map(_pattern, others))})(?s:.*)/"
        return name, [f"{name}[lazy]: {upper}_MARKED", f"{upper}_MARKED: {pattern}"]


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _without(marks: Sequence[str], text: str = "(?s:.*)") -> str:
    """A pattern for that part of the text that has none of the marks."""
    return f"/{text}/ & ~/(?s:.*)({'|'.join(map(_pattern, marks))})(?s:.*)/"


def _answer(grammar: common_pb2.Grammar) -> list[str]:
    """The rule `answer`. Raises BatonError for a grammar that cannot be a part of another."""
    kind = grammar.WhichOneof("kind")
    if kind in ("json_schema", "json_object"):
        try:
            schema = json.loads(grammar.json_schema) if kind == "json_schema" else {"type": "object"}
        except (ValueError, RecursionError) as error:
            raise invalid_field("sampling.grammar", f": {error}", "INVALID_GRAMMAR") from None
        if not isinstance(schema, dict):
            text = ": beside tools or reasoning a schema must be an object"
            raise invalid_field("sampling.grammar", text)
        return [f"answer: %json {_spaced(schema)}"]
    if kind == "regex":
        # A slash ends it, unless it is escaped already.
        regex = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", grammar.regex, flags=re.DOTALL)
        return [f"answer: /{regex}/"]
    if kind == "choice":
        return [f"answer: {' | '.join(map(_literal, grammar.choice.strings))}"]
    text = ": a Lark grammar cannot be beside tools or reasoning; give raw_output or no tools"
    raise invalid_field("sampling.grammar", text)


def _rewritten(tool: tokenizer_pb2.Tool) -> Rewritten:
    """The schema of the arguments; of a tool that is not strict, as far as it can be enforced. Raises
    BatonError."""
    try:
        made = rewrite(
            json.loads(tool.parameters or '{"type":"object","properties":{}}'), loose=not tool.strict
        )
        options = made.schema.get("x-guidance") if isinstance(made.schema, dict) else None
        lenient = isinstance(options, dict) and options.get("lenient")
        if tool.strict and not lenient:
            _check_enforced(made)
        as_lark(made.schema, "literals")  # raises SchemaError
    except (ValueError, RecursionError) as error:
        raise _invalid_schema(tool, str(error)) from None
    if not isinstance(made.schema, dict):
        raise _invalid_schema(tool, "it is no object")
    return made


def _check_enforced(made: Rewritten) -> None:
    """Raises SchemaError for what the library refuses where it stands. Definitions may not be referred to; of
    these the library finds it."""
    named = [each for each in made.unenforced if not each.startswith(_DEFINITIONS)]
    if named:
        raise SchemaError(f"{', '.join(named[:8])} cannot be enforced")


def _invalid_schema(tool: tokenizer_pb2.Tool, why: str) -> BatonError:
    text = f": the schema of {tool.name}: {why}"
    return invalid_field("chat.tools", text, "INVALID_GRAMMAR")


def _schema(tool: tokenizer_pb2.Tool, *, any_object: bool) -> str:
    schema: dict[str, Any] = {"type": "object"}
    if not any_object:
        schema = dict(_rewritten(tool).schema)
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            text = f": the schema of {tool.name} is of no object, which arguments are"
            raise invalid_field("chat.tools", text)
        schema["type"] = "object"
        if "properties" in schema and "patternProperties" not in schema:
            schema.setdefault("additionalProperties", False)
    return _spaced(schema)


def _spaced(schema: dict[str, Any]) -> str:
    """The schema's text, with the options that it does not have itself."""
    options = schema.get("x-guidance", {})
    return dumps({**schema, "x-guidance": {**_SPACE, **options} if isinstance(options, dict) else options})


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
