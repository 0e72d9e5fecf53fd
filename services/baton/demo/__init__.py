"""The models inside the package, served under names of their own without a download. Each is an ordinary
Hugging Face directory (see its README.md).

`demo`, which is served when no other model is named, is a small Qwen3 checkpoint that has read Python's own
documentation: its text can be read. `demo-vision` is a tiny Qwen3-VL checkpoint that names drawn figures.
`tools/train_demo_model.py` and `tools/train_demo_vision.py` make them.
"""

import pathlib

__all__ = ["MODELS", "model_path"]

MODELS = {"demo": "model", "demo-vision": "vision"}
"""Name -> folder."""


def model_path(name: str = "demo") -> pathlib.Path:
    """Directory of the checkpoint: config.json, model.safetensors, tokenizer.json and what goes with them.
    name: one of MODELS."""
    return pathlib.Path(__file__).parent / MODELS[name]
