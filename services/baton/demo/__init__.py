"""The model inside the package: a small Qwen3 checkpoint that has read Python's own documentation.

`model/` is an ordinary Hugging Face directory (see its README.md), served under the name `demo` when no other
model is named, so that a deployment starts without a download and its text can be read.
`tools/train_demo_model.py` makes it.
"""

import pathlib

__all__ = ["model_path"]


def model_path() -> pathlib.Path:
    """Directory of the checkpoint: config.json, model.safetensors, tokenizer.json and what goes with them."""
    return pathlib.Path(__file__).parent / "model"
