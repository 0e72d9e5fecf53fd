"""Which format the quantized weights of a checkpoint have, by quantization_config in its config.json, or by
the files that some programs write instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.checkpoint_limits import read_json
from baton.layers.quantization.awq import Awq
from baton.layers.quantization.compressed_tensors import Compressed, Packed
from baton.layers.quantization.fp8 import Fp8, Fp8Blocks
from baton.layers.quantization.gptq import Gptq
from baton.layers.quantization.quantized_tensor import CheckpointFormat
from baton.model_path import CheckpointError

METHODS = ("fp8", "modelopt", "compressed-tensors", "gptq", "awq", "auto-round", "mxfp4")
_COMPRESSED = ("naive-quantized", "float-quantized", "int-quantized", "pack-quantized")


def quantization_config(path: Path) -> dict[str, Any]:
    """How the checkpoint in the directory `path` says that it is quantized; empty: it is not. AutoGPTQ and
    AutoAWQ have written quantize_config.json and quant_config.json, ModelOpt hf_quant_config.json. Raises
    CheckpointError for a file that cannot be read."""
    config = _read(path / "config.json")
    for part in (config, config.get("text_config") or {}):
        if scheme := part.get("quantization_config"):
            return dict(scheme)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if found := _read(path / name):
            return {"quant_method": method, **found}
    inner = _read(path / "hf_quant_config.json").get("quantization")
    return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    """An object; empty where there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_format(config: Mapping[str, Any] | None) -> CheckpointFormat | None:
    """None: nothing is quantized, or only experts in MXFP4, which `mxfp4` reads. Raises CheckpointError with
    the name of a scheme that is not supported."""
    if not config:
        return None
    method = config.get("quant_method")
    if method == "mxfp4":
        return None
    try:
        if method == "fp8":
            return _fp8(config)
        if method == "modelopt":
            return _modelopt(config)
        if method == "gptq":
            return _gptq(config)
        if method == "awq":
            return _awq(config)
        if method == "auto-round":
            return _auto_round(config)
        if method == "compressed-tensors":
            return _compressed(config)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"quantization_config of {method!r} cannot be used: {error!r}") from error
    raise _refusal(f"by {method!r}")


def _refusal(scheme: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoints quantized {scheme} are not supported (quantization_config); supported are "
        f"{', '.join(METHODS)}"
    )


def _fp8(config: Mapping[str, Any]) -> CheckpointFormat:
    if config.get("fmt", "e4m3") != "e4m3":
        raise _refusal(f"by 'fp8' with fmt {config['fmt']!r}")
    block = config.get("weight_block_size")
    return Fp8Blocks(*_sizes(block)) if block else Fp8()


def _modelopt(config: Mapping[str, Any]) -> CheckpointFormat:
    algorithm = config.get("quant_algo")
    if algorithm != "FP8":
        raise _refusal(f"by 'modelopt' with quant_algo {algorithm!r}")
    return Fp8()


def _sizes(block: Any) -> tuple[int, int]:
    rows, columns = block
    if not (isinstance(rows, int) and isinstance(columns, int) and rows > 0 and columns > 0):
        raise ValueError(f"blocks of {block!r}")
    return rows, columns


def _gptq(config: Mapping[str, Any]) -> CheckpointFormat:
    bits = config["bits"]
    if bits not in (4, 8):
        raise _refusal(f"by 'gptq' with {bits} bits")
    for modules, override in (config.get("dynamic") or {}).items():
        if not modules.startswith("-:") and _differs(override, config):  # -: leaves modules as they are
            raise _refusal("by 'gptq' with different schemes for different layers (dynamic)")
    version = config.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise _refusal(f"by 'gptq' in checkpoint_format {version!r}")
    reordered = bool(config.get("desc_act"))
    return Gptq(bits, _group(config), reordered=reordered, minus_one=version == "gptq")


def _differs(override: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether what is said of some modules is another scheme than that of all."""
    return any(config.get(key) != value for key, value in override.items())


def _auto_round(config: Mapping[str, Any]) -> CheckpointFormat:
    """AutoRound: Cheng et al., arXiv:2309.05516. It stores what it finds as others do."""
    packing = str(config.get("packing_format")).removeprefix("auto_round:")
    for override in (config.get("extra_config") or {}).values():
        scheme = {key: override[key] for key in ("bits", "group_size", "sym") if key in override}
        if scheme.get("bits") != 16 and _differs(scheme, config):
            raise _refusal("by 'auto-round' with different schemes for different layers (extra_config)")
    stored = {"bits": config["bits"], "group_size": _group(config)}
    if packing == "auto_gptq":
        return _gptq(stored)
    if packing == "auto_awq":
        return _awq(stored)
    raise _refusal(f"by 'auto-round' in packing_format {packing!r}")


def _awq(config: Mapping[str, Any]) -> CheckpointFormat:
    bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if bits != 4:
        raise _refusal(f"by 'awq' with {bits} bits")
    if version != "gemm":
        raise _refusal(f"by 'awq' of version {version!r}")
    if not config.get("zero_point", True):
        raise _refusal("by 'awq' without zero points")
    return Awq(_group(config))


def _group(config: Mapping[str, Any]) -> int:
    group = config.get("group_size", config.get("q_group_size", 128))
    if not isinstance(group, int) or (group != -1 and group < 1):
        raise ValueError(f"group_size {group!r}")
    return group


def _compressed(config: Mapping[str, Any]) -> CheckpointFormat | None:
    name = "by 'compressed-tensors'"
    kind = config.get("format")
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(f"{name} with sparsity {sparsity['format']!r}")
    if config.get("transform_config"):
        raise _refusal(f"{name} with a transform_config")
    if not config["config_groups"] and config.get("kv_cache_scheme"):
        return None
    found: list[CheckpointFormat] = []
    for group in config["config_groups"].values():
        if "weights" in group and group["weights"] is None:
            continue  # it rounds activations alone, which stay as they are
        format = group.get("format") or kind
        if format not in _COMPRESSED:
            raise _refusal(f"{name} in format {format!r}")
        found.append(_compressed_group(name, format, group["weights"]))
    if not found and config["config_groups"]:
        return None
    if not found or any(each != found[0] for each in found):
        raise _refusal(f"{name} with {len(found)} different schemes")
    return found[0]


def _compressed_group(name: str, kind: str, weights: Mapping[str, Any]) -> CheckpointFormat:
    bits, floating = weights["num_bits"], weights.get("type", "int") == "float"
    strategy, symmetric = weights.get("strategy", "tensor"), weights.get("symmetric", True)
    group, rows = -1, 1
    if strategy == "group":
        group = int(weights["group_size"])
    elif strategy == "block":
        rows, group = _sizes(weights["block_structure"])
    elif strategy not in ("tensor", "channel"):
        raise _refusal(f"{name} with strategy {strategy!r}")
    if kind == "pack-quantized":
        if bits not in (4, 8) or floating or rows > 1:
            raise _refusal(f"{name}, packed, with {bits} bits of type {weights.get('type')!r}")
        return Packed(bits, symmetric, group)
    if bits != 8:
        raise _refusal(f"{name} with {bits} bits that are not packed")
    return Compressed(floating, symmetric, group, rows)
