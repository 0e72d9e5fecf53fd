"""Writes quantized checkpoints of the published formats, from their descriptions: loops, no code of Baton."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, Any]
Stored = dict[str, torch.Tensor]
"""A matrix's tensors, by the ends of their names."""


@dataclass(frozen=True)
class Scheme:
    config: dict[str, Any]
    """quantization_config"""
    quantize: Callable[[torch.Tensor, torch.Generator], tuple[Stored, torch.Tensor]]
    """Of a matrix [out, in]: what is stored, and float64 what that stands for."""


def fp8(static: bool, rows: bool) -> Scheme:
    def quantize(weight: torch.Tensor, random: torch.Generator) -> tuple[Stored, torch.Tensor]:
        peak = weight.abs().amax(1, keepdim=True) if rows else weight.abs().max()
        scale = peak.float() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale": scale}
        if static:
            stored["input_scale"] = torch.tensor(0.1)
        return stored, codes.double() * scale.double()

    return Scheme({"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}, quantize)


def fp8_blocks(size: tuple[int, int]) -> Scheme:
    def quantize(weight: torch.Tensor, random: torch.Generator) -> tuple[Stored, torch.Tensor]:
        (rows, columns), (high, wide) = weight.shape, size
        scales = torch.zeros(-(-rows // high), -(-columns // wide))
        codes = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        values = torch.zeros(weight.shape, dtype=torch.float64)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = weight[block].abs().max() / 448
                codes[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
                values[block] = codes[block].double() * scales[i, j].double()
        return {"weight": codes, "weight_scale_inv": scales}, values

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(size)}
    return Scheme(config, quantize)


def _affine(
    weight: torch.Tensor, bits: int, group_of: Array, symmetric: bool, dtype: torch.dtype
) -> tuple[Array, Array, torch.Tensor]:
    """Codes [out, in], zeros and scales [out, groups] of unsigned numbers."""
    values, groups = weight.double().numpy(), int(group_of.max()) + 1
    codes = np.zeros(values.shape, dtype=np.int64)
    zeros = np.zeros((len(values), groups), dtype=np.int64)
    scales = torch.zeros(len(values), groups, dtype=dtype)
    top = 2**bits - 1
    for group in range(groups):
        columns = np.flatnonzero(group_of == group)
        part = values[:, columns]
        if symmetric:
            low, high = -np.abs(part).max(1), np.abs(part).max(1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scales[:, group] = torch.from_numpy((high - low) / top).to(dtype)
        scale = scales[:, group].double().numpy()
        zero = np.full(len(values), 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scale), 1, top)
        zeros[:, group] = zero
        codes[:, columns] = np.clip(np.round(part / scale[:, None]) + zero[:, None], 0, top)
    return codes, zeros, scales


def _values(
    codes: Array,
    zeros: Array,
    scales: torch.Tensor,
    group_of: Array,
) -> torch.Tensor:
    return torch.from_numpy((codes - zeros[:, group_of]) * scales.double().numpy()[:, group_of])


def _words(numbers: Array, bits: int, places: list[int] | None = None) -> torch.Tensor:
    """[rows, n] -> int32 [rows, n * bits / 32]; number i of a word's is its places[i]-th."""
    each = 32 // bits
    rows, count = numbers.shape
    words = np.zeros((rows, -(-count // each)), dtype=np.uint32)
    for column in range(count):
        word, at = divmod(column, each)
        if places is not None:
            at = places.index(at)
        words[:, word] |= (numbers[:, column] << (bits * at)).astype(np.uint32)
    return torch.from_numpy(words.view(np.int32).copy())


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = True, desc_act: bool = False, version: str = "gptq"
) -> Scheme:
    def quantize(weight: torch.Tensor, random: torch.Generator) -> tuple[Stored, torch.Tensor]:
        inputs = weight.shape[1]
        size = inputs if group < 0 else group
        group_of = np.arange(inputs) // size
        if desc_act:
            group_of = group_of[torch.randperm(inputs, generator=random).numpy()]
        codes, zeros, scales = _affine(weight, bits, group_of, symmetric, torch.float16)
        stored = {
            "qweight": _words(codes, bits).t().contiguous(),
            "qzeros": _words((zeros - (version == "gptq")).T, bits),
            "scales": scales.t().contiguous(),
            "g_idx": torch.from_numpy(group_of).to(torch.int32),
        }
        return stored, _values(codes, zeros, scales, group_of)

    config = {
        **{"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": symmetric},
        "checkpoint_format": version,
    }
    return Scheme(config, quantize)


def awq(group: int = 32) -> Scheme:
    def quantize(weight: torch.Tensor, random: torch.Generator) -> tuple[Stored, torch.Tensor]:
        group_of = np.arange(weight.shape[1]) // group
        codes, zeros, scales = _affine(weight, 4, group_of, False, torch.float16)
        places = [0, 2, 4, 6, 1, 3, 5, 7]
        stored = {
            "qweight": _words(codes.T, 4, places),
            "qzeros": _words(zeros.T, 4, places),
            "scales": scales.t().contiguous(),
        }
        return stored, _values(codes, zeros, scales, group_of)

    return Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        quantize,
    )


def compressed(name: str, **weights: Any) -> Scheme:
    """By the format's own library. `weights`: its QuantizationArgs."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    own = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)

    def quantize(weight: torch.Tensor, random: torch.Generator) -> tuple[Stored, torch.Tensor]:
        low, high = _extremes(weight, args)
        scale, zero = calculate_qparams(low, high, args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        stored = compressor.compress(dict(state), own)
        exact = {
            end: tensor.double() if end == "weight_scale" else tensor.clone()
            for end, tensor in stored.items()
        }
        return dict(stored), compressor.decompress(exact, own)["weight"].double()

    group = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json()), "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": group}}
    return Scheme(config, quantize)


def _extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Of what shares a scale, in the shape of the scales."""
    rows, columns = weight.shape
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        high, wide = args.block_structure
        blocks = weight.view(rows // high, high, columns // wide, wide)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    parts = weight.view(rows, columns // args.group_size, args.group_size)
    return parts.amin(2), parts.amax(2)


def write(
    path: Path, model: torch.nn.Module | None, scheme: Scheme, skip: tuple[str, ...] = ("lm_head",)
) -> None:
    """Quantizes the matrices of the layers in a checkpoint of `model`, which gets the weights that it then
    stands for. Not those whose names have a part of `skip`."""
    tensors = load_file(path / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    out: Stored = {}
    for name in sorted(tensors):
        tensor, base = tensors[name], name.removesuffix(".weight")
        router = base.endswith(("mlp.gate", "block_sparse_moe.gate"))
        if tensor.dim() != 2 or ".layers." not in name or router or any(part in name for part in skip):
            out[name] = tensor
            continue
        stored, values = scheme.quantize(tensor, random)
        out |= {f"{base}.{end}": each.contiguous() for end, each in stored.items()}
        tensors[name] = values.float()
    save_file(out, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": scheme.config}))
    if model is not None:
        _set(model, path, tensors)


def _set(model: torch.nn.Module, path: Path, tensors: Stored) -> None:
    """Gives the model the weights of a checkpoint with these tensors."""
    plain = path / "plain"
    plain.mkdir()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    model.load_state_dict(type(model).from_pretrained(plain).state_dict())
