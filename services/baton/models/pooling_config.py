"""How embeddings are made, by the files that sentence-transformers keeps beside weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.checkpoint_limits import read_json, read_json_list
from baton.model_path import CheckpointError

MODULES = "modules.json"


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    mode: str = "last"
    """Which final hidden states an embedding is made of: "last" or "mean"."""
    normalize: bool = True
    """Embeddings are divided by their length."""


_MODES = {"lasttoken": "last", "mean": "mean"}


def read_pooling(path: Path) -> PoolingConfig:
    """Reads modules.json in the directory `path`; the defaults where there is none, as beside a GGUF file.

    Raises CheckpointError for modules that Baton does not compute.
    """
    file = path / MODULES
    if not file.is_file():
        return PoolingConfig()
    modules = read_json_list(file)
    kinds = [
        str(each.get("type", "")).rpartition(".")[2] if isinstance(each, dict) else "" for each in modules
    ]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"{file} has the modules {', '.join(kinds)}; supported are Transformer, Pooling and Normalize"
        )
    folder = str(modules[1].get("path", ""))
    if Path(folder).name != folder or not folder:
        raise CheckpointError(f"{file} names {folder!r}, which is no folder beside it; get it again")
    pooling = path / folder / "config.json"
    mode = _mode(pooling, read_json(pooling))
    return PoolingConfig(mode, len(modules) == 3)


def _mode(file: Path, config: dict[str, Any]) -> str:
    """Files of sentence-transformers have a flag for each mode, newer ones the mode's name."""
    named = config.get("pooling_mode")
    flags = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = [name.removeprefix("pooling_mode_").removesuffix("_tokens") for name in flags]
    if named is not None:
        modes = list(map(str, named)) if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in _MODES:
        found = ", ".join(modes) or "(none)"
        raise CheckpointError(f"{file} asks for pooling {found}; supported are lasttoken and mean_tokens")
    if modes == ["mean"] and config.get("include_prompt") is False:
        raise CheckpointError(
            f"{file} leaves prompts out of the mean (include_prompt), which is not supported"
        )
    return _MODES[modes[0]]
