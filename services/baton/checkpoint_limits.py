"""What a checkpoint's JSON files may say, checked before a library reads them: numbers far beyond any model's
would otherwise cost minutes and gigabytes before something fails. Imports no library of models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.model_path import CheckpointError

MAX_BYTES = 2**28
"""Size of a JSON file."""
MAX_DEPTH = 64
MAX_ADDED_TOKENS = 50_000
"""transformers takes about a second for 4,000."""
MAX_GROWTH = 64
"""How many characters a tokenizer's replacements may make of one."""
MAX_INTEGER = 2**53
_LIMITS = (
    (re.compile(r"layers?$"), 512),
    (re.compile(r"experts$"), 4096),
    (re.compile(r"heads?$"), 4096),
    (re.compile(r"head_dim$"), 4096),
    (re.compile(r"(_dim|_rank|_model|_embd|_inner|_size)$"), 2**24),
    (re.compile(r"(positions|_embeddings)$"), 2**27),
)
"""Largest integers, by what their names end with; the first that fits."""
MAX_EXPERTS_OF_ALL_LAYERS = 2**16


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError."""
    content = _json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"cannot read {path}: it is not a JSON object")
    return content


def read_json_list(path: Path) -> list[Any]:
    """Raises CheckpointError."""
    content = _json(path)
    if not isinstance(content, list):
        raise CheckpointError(f"cannot read {path}: it is not a JSON list")
    return content


def _json(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"cannot read {path}: it has more than {MAX_BYTES >> 20} MiB")
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise CheckpointError(f"cannot read {path}: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {' '.join(str(error).split())[:300]}") from error


def check_sizes(path: Path, config: Any) -> None:
    """`config`: content of config.json, or what a GGUF file says instead. Raises CheckpointError."""
    most = {"layers": 1, "experts": 1}
    for name, value in _integers(path, config):
        limit = next((limit for pattern, limit in _LIMITS if pattern.search(name)), MAX_INTEGER)
        if abs(value) > limit:
            raise CheckpointError(f"{path} cannot be used: {name} is beyond {limit}")
        for what in most:
            if name.endswith(what):
                most[what] = max(most[what], value)
    if most["layers"] * most["experts"] > MAX_EXPERTS_OF_ALL_LAYERS:
        text = f"{most['layers']} layers of {most['experts']} experts"
        raise CheckpointError(f"{path} cannot be used: {text}, beyond {MAX_EXPERTS_OF_ALL_LAYERS} in all")


def _integers(path: Path, content: Any, depth: int = 0) -> Iterator[tuple[str, int]]:
    """All in objects, with their names."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"cannot read {path}: it is nested too deep")
    for name, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, dict | list):
            yield from _integers(path, value, depth + 1)
        elif isinstance(value, int) and isinstance(name, str):
            yield name, value


def check_tokenizer(folder: Path) -> None:
    """Checks a checkpoint's tokenizer.json and tokenizer_config.json. Raises CheckpointError."""
    for name, key in (("tokenizer.json", "added_tokens"), ("tokenizer_config.json", "added_tokens_decoder")):
        path = folder / name
        if not path.is_file():
            continue
        content = read_json(path)
        check_added_tokens(path, len(content.get(key) or ()))
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if (growth := _growth(path, content.get(part))) > MAX_GROWTH:
                text = f"its {part} makes up to {growth:.3g} characters of one, beyond {MAX_GROWTH}"
                raise CheckpointError(f"cannot use the tokenizer in {path}: {text}")


def check_added_tokens(path: Path, count: int) -> None:
    """Raises CheckpointError."""
    if count > MAX_ADDED_TOKENS:
        text = f"it adds {count} tokens, beyond {MAX_ADDED_TOKENS}"
        raise CheckpointError(f"cannot use the tokenizer in {path}: {text}")


def _growth(path: Path, part: Any, depth: int = 0) -> float:
    """How many characters the replacements of this part, one after the other, can make of one."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"cannot read {path}: it is nested too deep")
    if isinstance(part, list):
        growth = 1.0
        for each in part:
            growth *= _growth(path, each, depth + 1)
        return growth
    if not isinstance(part, dict):
        return 1.0
    growth = 1.0
    if part.get("type") == "Replace":
        pattern, content = part.get("pattern"), part.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # An expression may match one character, or none, between any two.
        length = len(content) if isinstance(content, str) else 0
        growth = max(1.0, length / len(text)) if isinstance(text, str) and text else 1.0 + length
    for value in part.values():
        if isinstance(value, dict | list):
            growth *= _growth(path, value, depth + 1)
    return growth
