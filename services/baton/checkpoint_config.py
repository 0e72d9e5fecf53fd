"""What tokenizer processes and workers read alike of a checkpoint's files. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baton.checkpoint_limits import read_json


def end_token_ids(path: Path) -> tuple[int, ...]:
    """End-of-sequence ids that the files in `path` name, ascending: those of config.json and of the language
    model in it, of generation_config.json, which often alone has a chat model's end of turn, and the
    tokenizer's own. Raises CheckpointError for a damaged file."""
    config = _read(path / "config.json")
    found = {*_ids(config), *_ids(config.get("text_config")), *_ids(_read(path / "generation_config.json"))}
    return tuple(sorted({*found, *_of_tokenizer(path)}))


def context_length(config: Mapping[str, Any]) -> int:
    """Positions that a model was made for, by its configuration; 0: it is not said. YaRN that was added by
    hand extends `max_position_embeddings`, which stays as it was. Source: the README of Qwen3."""
    stated = int(config.get("max_position_embeddings") or 0)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(rope.get("factor", 1) * original))


def _ids(config: Any) -> Iterator[int]:
    value = config.get("eos_token_id") if isinstance(config, dict) else None
    values = value if isinstance(value, list) else [value]
    yield from (each for each in values if isinstance(each, int) and each >= 0)


def _of_tokenizer(path: Path) -> Iterator[int]:
    options = _read(path / "tokenizer_config.json")
    token = options.get("eos_token") or _read(path / "special_tokens_map.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return
    added = options.get("added_tokens_decoder")
    for id, each in added.items() if isinstance(added, dict) else ():
        if isinstance(each, dict) and each.get("content") == text and id.isdecimal():
            yield int(id)
            return
    tokenizer = _read(path / "tokenizer.json")  # megabytes: only where it must be
    for each in tokenizer.get("added_tokens") or ():
        if isinstance(each, dict) and each.get("content") == text:
            yield int(each["id"])
            return
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        yield int(vocabulary[text])


def _read(path: Path) -> dict[str, Any]:
    """An object; empty where there is no such file."""
    return read_json(path) if path.is_file() else {}
