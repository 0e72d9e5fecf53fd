"""A checkpoint that says what its script holds: whole deployments serve it where a test must know the answer.

Its chat template looks at the conversation, takes the first rule that holds, and ends the prompt with that
rule's cue, a special token. The weights are a table of which token follows which: the cue is followed by the
pieces of the rule's answer, each a token of its own, and those by the end. What else the prompt holds changes
nothing; images neither, which rules of a model that sees find as IMAGE.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from baton.demo import model_path
from vision_models import processor, seeing_table

VISION = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
IMAGE = "".join(VISION[:3])
PIECE = 24
"""Bytes of an answer's piece, at least, but for the last one."""

PROMPT = """\
{%- set names = (tools or []) | map(attribute='function.name') | list -%}
{%- set seen = namespace(text='', asked='', told='') -%}
{%- if tools %}{{ '<|im_start|>system\n' ~ (tools | tojson) ~ '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{%- set said = namespace(text='') -%}
{%- if message.content is string %}{% set said.text = message.content -%}
{%- else %}{% for part in message.content or [] %}
{%- set said.text = said.text ~ (IMAGE if part.type == 'image' else part.text) %}{% endfor %}{% endif -%}
{%- set content = said.text -%}
{%- set calls = message.tool_calls | default([], true) | tojson -%}
{%- set calls = '<tool_call>' ~ calls ~ '</tool_call>' if message.tool_calls else '' -%}
{%- set seen.text = seen.text ~ content ~ calls -%}
{%- if message.role == 'user' %}{% set seen.asked = content %}{% endif -%}
{%- if message.role == 'tool' %}{% set seen.told = seen.told ~ content %}{% endif -%}
{{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ calls ~ '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}CHOICE{% endif -%}
"""


class Rule(NamedTuple):
    """when: an expression of Jinja over `names` (of the tools that are offered), and `seen`: its `text` (all
    contents and calls), `asked` (the last user's message) and `told` (what tools gave)."""

    when: str
    answer: str


def call(name: str, **arguments: Any) -> str:
    """A tool call in the Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def save_scripted(folder: Path, rules: Sequence[Rule], context: int, *, sees: bool = False) -> Path:
    """The last rule should always hold. context: in tokens. sees: it takes images."""
    source = model_path()
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    end = next(each for each in tokenizer["added_tokens"] if each["content"] == "<|im_end|>")
    follows: dict[int, int] = {}
    vision = VISION if sees else []
    for name in vision:
        vocabulary[name] = len(vocabulary)
        tokenizer["added_tokens"].append({**end, "id": vocabulary[name], "content": name})
    choice = ""
    for number, rule in enumerate(rules):
        cue = f"<|cue-{number}|>"
        choice += f"{{%- {'elif' if number else 'if'} {rule.when} %}}{{{{ '{cue}' }}}}"
        last = vocabulary[cue] = len(vocabulary)
        tokenizer["added_tokens"].append({**end, "id": last, "content": cue})
        cut = pieces(byte_level(rule.answer), frozenset(vocabulary))
        if cut is None:
            raise ValueError(f"cannot be told from other answers: {rule.answer}")
        for piece in cut:
            follows[last] = last = vocabulary[piece] = len(vocabulary)
        follows[last] = end["id"]
    table(len(vocabulary), follows, context, [vocabulary[name] for name in vision]).save_pretrained(folder)
    if sees:
        processor().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings |= {
        "chat_template": PROMPT.replace("CHOICE", choice + "{%- endif %}").replace("IMAGE", repr(IMAGE)),
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level(text: str) -> str:
    """As a byte-level vocabulary writes it."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def pieces(text: str, taken: frozenset[str]) -> list[str] | None:
    """Of PIECE characters or little more. None is taken: a token is followed by one token only."""
    for length in range(min(PIECE, len(text)), len(text) + 1):
        head, tail = text[:length], text[length:]
        if head not in taken:
            rest = pieces(tail, taken | {head}) if tail else []
            if rest is not None:
                return [head, *rest]
    return None


def table(size: int, follows: dict[int, int], context: int, vision: list[int]) -> Any:
    """size: of the vocabulary. What follows no token in the table is token 0. vision: ids of VISION, of a
    model that sees."""
    width = -len(follows) // 16 * -16
    options: dict[str, Any] = {
        "vocab_size": size,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": [2, 0],
    }
    model: Any = seeing_table(options, vision) if vision else LlamaForCausalLM(LlamaConfig(**options))
    text = model.model.language_model if vision else model.model
    with torch.no_grad():
        for name, parameter in [*text.named_parameters(), *model.lm_head.named_parameters()]:
            parameter.fill_(1.0 if "norm" in name else 0.0)
        for row, (token, following) in enumerate(follows.items()):
            text.embed_tokens.weight[token, row] = 1.0
            # After the last norm a row is sqrt(width) long: no sampling chooses another token.
            model.lm_head.weight[following, row] = 100.0
    return model
