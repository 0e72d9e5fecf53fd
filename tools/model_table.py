"""Which architectures of the installed transformers Baton serves, by whose code: a table in docs/models.md.

    python tools/model_table.py --write docs/models.md

Asks for each architecture, with its configuration's own defaults, what `baton doctor` asks: without weights.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS = 12
BEGIN, END = "<!-- made by tools/model_table.py -->\n", "<!-- end -->\n"


def architectures() -> Iterator[tuple[str, str]]:
    """(model type, architecture) of all language models, with or without images."""
    from transformers.models.auto import modeling_auto

    found = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    for kind, names in sorted(found.items()):
        yield kind, names if isinstance(names, str) else names[0]


def verdict(kind: str, architecture: str) -> tuple[str, str]:
    """("own", ""), ("transformers", ""), or ("refused", why)."""
    import torch
    from transformers import AutoConfig

    from baton.model_path import CheckpointError
    from baton.models.config import read_config
    from baton.models.loader import kv_shape

    with tempfile.TemporaryDirectory() as folder:
        try:
            config = AutoConfig.for_model(kind)
            config.architectures = [architecture]
            shorten(config.get_text_config())
            config.save_pretrained(folder)
        except Exception as error:  # some configurations cannot be made without arguments
            return "refused", f"no default configuration: {type(error).__name__}"
        try:
            with torch.inference_mode():
                found = read_config(Path(folder))
                if found.implementation == "transformers":
                    kv_shape(found)
        except CheckpointError as error:
            return "refused", str(error)
        return ("own" if found.implementation == "baton" else "transformers"), ""


def shorten(text: Any) -> None:
    """Fewer layers, so that it does not take an hour; the kinds of layers repeat sooner."""
    layers = min(LAYERS, getattr(text, "num_hidden_layers", LAYERS))
    with contextlib.suppress(AttributeError, NotImplementedError):
        text.num_hidden_layers = layers
        for name in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
            if isinstance(kinds := getattr(text, name, None), list):
                setattr(text, name, kinds[:layers])


def short(why: str) -> str:
    """The reason without what all such lines have in common."""
    for end in ("; Baton's own are", "; supported are"):
        why = why.split(end)[0]
    return why.split(" is not supported: ")[-1].split(" cannot be used: ")[-1].split("ForCausalLM: ")[-1]


def rows() -> Iterator[str]:
    yield "| architecture | served by |"
    yield "| --- | --- |"
    for kind, architecture in architectures():
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            by, why = verdict(kind, architecture)
        words = {"own": "Baton's own code", "transformers": "transformers' code"}
        yield f"| `{architecture}` (`{kind}`) | {words.get(by) or f'refused: {short(why)}'} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="a page with the table between two marks")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    import transformers

    transformers.logging.set_verbosity_error()
    table = []
    for row in rows():
        print(row, flush=True)
        table.append(row)
    if options.write:
        text = options.write.read_text()
        before, _, rest = text.partition(BEGIN)
        version = f"transformers {transformers.__version__}:\n\n"
        options.write.write_text(
            before + BEGIN + version + "\n".join(table) + "\n" + END + rest.partition(END)[2]
        )


if __name__ == "__main__":
    main()
