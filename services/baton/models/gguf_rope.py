"""Rotation in GGUF files, as rope parameters of transformers."""

from __future__ import annotations

from typing import Any

from baton.gguf_file import GgufFile
from baton.model_path import CheckpointError


def rope_parameters(file: GgufFile, head_dim: int, **more: Any) -> dict[str, Any]:
    """Rope parameters of heads of `head_dim` values. `more`: what files of the architecture leave out.
    Raises CheckpointError for a scaling that is not supported."""
    rotated = file.value("*.rope.dimension_count", int, head_dim)
    return {
        "rope_theta": float(file.value("*.rope.freq_base", float, 10000.0)),
        **({} if rotated == head_dim else {"partial_rotary_factor": rotated / head_dim}),
        **rope_scaling(file),
        **more,
    }


def rope_scaling(file: GgufFile) -> dict[str, Any]:
    """The kind of rotation and its parameters."""
    if "rope_freqs.weight" in file.tensors:
        # Files of Llama 3.1 and later hold what each frequency is divided by, and not the parameters that
        # these divisors come from. "longrope" takes divisors.
        divisors = file.unpack("rope_freqs.weight", slice(None)).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": file.value("*.context_length", int),
        }
    if "rope_factors_long.weight" in file.tensors:
        return _longrope(file)
    if file.value("*.rope.scaling.attn_factor", float, 1.0) != 1.0:
        raise CheckpointError(f"{file.path}: rope.scaling.attn_factor is supported with longrope only")
    kind = file.value("*.rope.scaling.type", str, "linear")
    factor = file.value("*.rope.scaling.factor", float, file.value("*.rope.scale_linear", float, 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        return {"rope_type": kind, "factor": factor, **_yarn(file)}
    if kind == "longrope":
        raise CheckpointError(f"{file.path} lacks tensor rope_factors_long.weight")
    raise CheckpointError(
        f"{file.path}: rope scaling {kind!r} is not supported; supported are linear, longrope, yarn"
    )


def _longrope(file: GgufFile) -> dict[str, Any]:
    if "rope_factors_short.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks tensor rope_factors_short.weight")
    parameters: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": file.unpack("rope_factors_short.weight", slice(None)).tolist(),
        "long_factor": file.unpack("rope_factors_long.weight", slice(None)).tolist(),
        "original_max_position_embeddings": file.value("*.rope.scaling.original_context_length", int),
    }
    if (scale := file.value("*.rope.scaling.attn_factor", float, 0.0)) != 0.0:
        parameters["attention_factor"] = scale
    return parameters


def _yarn(file: GgufFile) -> dict[str, Any]:
    if file.value("*.rope.scaling.yarn_ext_factor", float, 1.0) != 1.0:
        raise CheckpointError(f"{file.path}: rope.scaling.yarn_ext_factor other than 1 is not supported")
    parameters: dict[str, Any] = {
        "original_max_position_embeddings": file.value("*.rope.scaling.original_context_length", int)
    }
    names = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    for name, key in names.items():
        if (value := file.value(f"*.rope.scaling.yarn_{key}", float, 0.0)) != 0.0:
            parameters[name] = value
    if multiplier := file.value("*.rope.scaling.yarn_log_multiplier", float, 0.0):
        # DeepSeek: a tenth of mscale_all_dim. mscale is not in the file; in all models that were published
        # it is the same, and llama.cpp takes it so.
        scale = round(10 * multiplier, 6)
        parameters |= {"mscale": scale, "mscale_all_dim": scale}
    return parameters
