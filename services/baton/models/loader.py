"""From a checkpoint's files to a model on a device: its tensors, reading them, its fingerprint."""

from __future__ import annotations

import hashlib
import math
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from baton import cgroups
from baton.gguf_file import opened
from baton.layers.async_copy import PinnedPieces
from baton.layers.cache_spec import CacheSpec, State
from baton.layers.parameters import Parameter, Parameters
from baton.layers.quantization.quantized_tensor import QuantizedTensor
from baton.layers.quantization.weight_method import Filling, QuantizedWeight, WeightPlan
from baton.layers.tensor_parallel import ONE_RANK, Communicator, Shard
from baton.models import transformers_backend
from baton.models.config import ModelConfig, ModelError, read_config
from baton.models.decoder import Decoder, LanguageModel
from baton.models.kv_scales import is_kv_scale
from baton.models.registry import build
from baton.models.tensor_files import TensorFile, stored_shapes, tensor_files, twice
from baton.models.weight_plan import weight_plan

LoadingProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

_THREADS = 8
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_weights(path: Path, declared: Parameters, report: LoadingProgress) -> None:
    """Fills all parameters. Names and shapes are checked before anything is copied.

    Raises ModelError naming the tensor that is missing, unexpected or of another shape.
    """
    parameters = declared.table
    found = _check(path, parameters, declared.ignored, declared.elsewhere)
    names = [name for _, names in found for name in names]
    progress = _CopyProgress(sum(parameters[name].target.nbytes for name in names), report)
    filling = Filling()
    count = min(_THREADS, cgroups.cores())
    stripes = -(-count // len(found))
    with ThreadPoolExecutor(count, "weights") as threads:
        work = [
            threads.submit(_copy, file, names[first::stripes], parameters, filling, progress)
            for file, names in found
            for first in range(stripes)
        ]
        try:
            for part in work:
                part.result()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    filling.finish()


def _check(
    path: Path, parameters: dict[str, Parameter], ignored: Sequence[str], elsewhere: Collection[str]
) -> list[tuple[TensorFile, list[str]]]:
    """The tensors to read from each file."""
    missing, where = set(parameters), dict[str, Path]()
    found = []
    for file in tensor_files(path):
        names = []
        for name, shape in file.shapes().items():
            if name in elsewhere:
                continue
            if name in where:
                raise twice(name, where[name], file.path)
            if name not in missing:
                # Some checkpoints carry frequencies, although config.json determines them.
                known = name.startswith(tuple(ignored)) or name.endswith("rotary_emb.inv_freq")
                if known or is_kv_scale(name) or _is_bias_of_zeros(file, name, parameters):
                    continue
                raise ModelError(f"{file.path.name} holds unexpected tensor {name}")
            if shape != (shape_here := list(parameters[name].shape)):
                raise ModelError(f"tensor {name} has shape {shape}, the configuration asks for {shape_here}")
            missing.discard(name)
            where[name] = file.path
            names.append(name)
        found.append((file, names))
    if missing:
        first = next(name for name in parameters if name in missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks tensor {first}{more}")
    return found


def _is_bias_of_zeros(file: TensorFile, name: str, parameters: dict[str, Parameter]) -> bool:
    """GPTQModel writes one beside each quantized matrix, also where the model has none."""
    matrix = f"{name.removesuffix('bias')}weight"
    if not name.endswith(".bias") or matrix not in parameters or matrix not in file.quantized():
        return False
    return not any(isinstance(part, torch.Tensor) and part.any() for _, _, part in file.read([name], [name]))


def check_tensors(
    path: Path, context_length: int | None = None, implementation: str = "auto", quantization: str = "auto"
) -> list[str]:
    """Checks what can be known of a model without its weights: that its code can be served, and the names and
    shapes of its tensors. -> how names of tensors start that are there and left out, "*" for numbers. Raises
    CheckpointError."""
    config = read_config(path, context_length, implementation)
    if config.implementation == "transformers":
        transformers_backend.caches(config)
        transformers_backend.check_names(path, config, stored_shapes(path))
        return []
    plan = weight_plan(path, torch.device("meta"), quantization, False)
    parameters = declared(path, None, context_length, plan).parameters
    _check(path, parameters.table, parameters.ignored, parameters.elsewhere)
    names = {name for file in tensor_files(path) for name in file.shapes()}
    names -= {*parameters.table, "lm_head.weight"}  # which is the embedding, where it is not a parameter
    left = {start for start in parameters.ignored if any(name.startswith(start) for name in names)}
    return sorted({re.sub(r"\d+", "*", start.rstrip("._")) for start in left})


def _copy(
    file: TensorFile,
    names: list[str],
    parameters: dict[str, Parameter],
    filling: Filling,
    progress: _CopyProgress,
) -> None:
    """One thread's share; returns when all of it has arrived, or waits in `filling`."""
    device = next(iter(parameters.values())).target.device
    staging = PinnedPieces(device) if device.type == "cuda" and names else None
    whole = {
        name
        for name in names
        if (each := parameters[name]).convert is not None or each.shape != each.target.shape
    }
    # What is quantized by rows is quantized first.
    cuts = {
        name: cut
        for name in names
        if (cut := parameters[name].cut) is not None
        and not (isinstance(parameters[name].target, QuantizedWeight) and cut.axis)
    }
    kept = {
        name: (target.bits, target.group)
        for name in names
        if isinstance(target := parameters[name].target, QuantizedWeight)
    }
    for name, start, source in file.read(names, whole | cuts.keys(), cuts, kept):
        parameter = parameters[name]
        target, cut = parameter.target, parameter.cut
        if isinstance(source, QuantizedTensor):
            if isinstance(target, QuantizedWeight):
                source = source.map_rows(cut.of) if cut is not None and not cut.axis else source
                source = source.map_rows(parameter.convert) if parameter.convert else source
            else:
                source = source.dequantize() if cut is None else cut.of(source.dequantize())
        elif source.dtype not in _FLOATS:
            kind = str(source.dtype).removeprefix("torch.")
            raise ModelError(f"tensor {name} is {kind}, and there are no scales for it")
        if parameter.convert is not None and isinstance(source, torch.Tensor):
            source = parameter.convert(source)
        if isinstance(target, QuantizedWeight):
            filling.fill(target, start, source, cut.spans[0] if cut is not None and cut.axis else None)
            progress.add(target.nbytes * source.shape[0] // len(target.codes))
            continue
        assert isinstance(source, torch.Tensor)
        target = target if name in whole or name in cuts else target[start : start + len(source)]
        if staging is None or source.numel() != target.numel():
            target.copy_(source)
        else:
            staging.copy(source.flatten(), target.view(-1))
        progress.add(target.nbytes)
    if staging is not None:
        staging.wait()


class _CopyProgress:
    """Counts what all threads have copied; reports never overlap and never step back."""

    def __init__(self, total: int, report: LoadingProgress) -> None:
        self._total = total
        self._report = report
        self._done = 0
        self._lock = threading.Lock()
        report(0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._report(self._done, self._total)


def load_model(
    path: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    progress: LoadingProgress | None = None,
    context_length: int | None = None,
    implementation: str = "auto",
    quantization: str = "auto",
    quantize_head: bool = False,
    shard: Shard = ONE_RANK,
    communicator: Communicator | None = None,
) -> LanguageModel:
    """Reads a checkpoint's tensors straight to the device.

    `dtype` None: the checkpoint's own. `load_format` "dummy": random weights, always the same, of files only
    config.json is needed. `context_length`: how far the model will be used, if less than it can.
    `implementation`: see `read_config`; `quantization` and `quantize_head`: see `weight_plan`.
    `shard`: the part of the model to load, which computes together with the others by the `communicator`.
    Raises ModelError naming the tensor that is missing, unexpected or of another shape.
    """
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"load format {load_format!r} is not known; known are 'auto' and 'dummy'")
    config = read_config(path, context_length, implementation)
    dtype, device = dtype or config.dtype, torch.device(device)
    if config.implementation == "transformers":
        _check_plain(quantization, quantize_head, shard)
        if load_format != "dummy":
            transformers_backend.check_names(path, config, stored_shapes(path))
        return transformers_backend.load(path, config, dtype, device, load_format == "dummy")
    plan = weight_plan(path, device, quantization, quantize_head, load_format, dtype)
    parameters = Parameters(dtype, device, plan=plan, shard=shard, communicator=communicator)
    model = build(config, parameters)
    _check_shard(parameters, model)
    report = progress or (lambda done, total: None)
    if load_format == "dummy":
        fill_at_random(parameters, report)
    else:
        read_weights(path, parameters, report)
        if config.tied and not shard.rank:
            _check_tied(path)
    model.prepare()
    return model


def _check_plain(quantization: str, quantize_head: bool, shard: Shard) -> None:
    if shard.size > 1:
        raise ModelError(
            "only models of Baton's own families are divided among ranks; transformers' code computes this "
            "one: leave out --tp"
        )
    if quantization not in ("auto", "none") or quantize_head:
        raise ModelError(
            "weights are quantized while loading for Baton's own families only; leave out --quantization"
        )


def _check_shard(parameters: Parameters, model: Decoder) -> None:
    if parameters.shard.size > 1 and any(module.cuts is None for module in model.recurrent):
        raise ModelError(f"{model.config.architecture} is not divided among ranks; leave out --tp")
    if parameters.shard.size > 1 and parameters.plan.fp8:
        raise ModelError("--quantization fp8 does not work with --tp on a CPU; leave one of them out")
    if parameters.shard.ep and not any(".experts." in name for name in parameters.table):
        raise ModelError("--ep divides a mixture's experts, and this model has none; leave it out")


def _check_tied(path: Path) -> None:
    """Raises ModelError for an output projection that differs from the embedding, although config.json says
    that they are one."""
    both, files = {"lm_head.weight", "model.embed_tokens.weight"}, tensor_files(path)
    if not both <= {name for file in files for name in file.shapes()}:
        return  # to unpack an embedding takes seconds
    found: dict[str, torch.Tensor] = {}
    for file in files:
        names = both & file.shapes().keys()
        for name, _, tensor in file.read(names, names):
            found[name] = tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor
    if not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"]):
        raise ModelError(
            f"{path} has an lm_head.weight that differs from its embedding, but config.json ties them; set "
            "tie_word_embeddings to false there to use it"
        )


def declared(
    path: Path,
    dtype: torch.dtype | None = None,
    context_length: int | None = None,
    plan: WeightPlan | None = None,
    shard: Shard = ONE_RANK,
) -> Decoder:
    """One of Baton's own models without any memory, by its configuration alone. Raises CheckpointError for
    what is not supported."""
    config = read_config(path, context_length, "baton")
    meta = torch.device("meta")
    parameters = Parameters(dtype or config.dtype, meta, plan=plan or WeightPlan(), shard=shard)
    model = build(config, parameters)
    _check_shard(parameters, model)
    return model


def weight_bytes(
    path: Path,
    dtype: torch.dtype | None = None,
    context_length: int | None = None,
    implementation: str = "auto",
    quantization: str = "auto",
    quantize_head: bool = False,
    device: torch.device | None = None,
    load_format: str = "auto",
    shard: Shard = ONE_RANK,
) -> int:
    """Bytes of the weights that `load_model` would allocate for one rank on this device, a CPU if None.
    Raises ModelError."""
    config = read_config(path, context_length, implementation)
    if config.implementation == "transformers":
        _check_plain(quantization, quantize_head, shard)
        return transformers_backend.weight_bytes(config, dtype or config.dtype)
    dtype, device = dtype or config.dtype, device or torch.device("cpu")
    plan = weight_plan(path, device, quantization, quantize_head, load_format, dtype)
    return declared(path, dtype, context_length, plan, shard).weight_bytes


def cache_specs(config: ModelConfig) -> Sequence[CacheSpec]:
    """What each layer keeps."""
    if config.implementation == "transformers":
        return transformers_backend.caches(config)
    return build(config, Parameters(config.dtype, torch.device("meta"))).caches


def indivisible(specs: Sequence[CacheSpec], tp: int, kv_dtype: str) -> str | None:
    """Why what these layers keep cannot be in FP8 or divided among `tp` ranks; None: it can. Whoever does so
    takes the first layer's KV heads for those of all."""
    if kv_dtype != "auto" and any(spec.parts == 1 for spec in specs):
        return f"--kv-dtype {kv_dtype}: pages of latents are kept in the model's dtype only; leave it out"
    heads = {spec.heads for spec in specs if not isinstance(spec, State)}
    if (tp > 1 or kv_dtype != "auto") and len(heads) > 1:
        return "layers with different numbers of KV heads: leave out --tp and --kv-dtype"
    return None


def fill_at_random(
    parameters: Parameters, report: LoadingProgress, seeds: Mapping[str, int] | None = None
) -> None:
    """Normal with deviation 1 / sqrt(inputs), so that activations neither vanish nor explode. `seeds`: of a
    part of a model, the index of each tensor in the whole."""
    progress = _CopyProgress(parameters.nbytes, report)
    filling = Filling()
    for number, (name, parameter) in enumerate(parameters.table.items()):
        target, index = parameter.target, number if seeds is None else seeds[name]
        if isinstance(target, QuantizedWeight):
            generator = torch.Generator(target.device).manual_seed(index)
            noise = torch.randn(target.shape, generator=generator, device=target.device)
            filling.fill(target, 0, noise.div_(math.sqrt(target.shape[1])))
        elif parameter.fill == "normal":
            generator = torch.Generator(target.device).manual_seed(index)
            target.normal_(0.0, 1 / math.sqrt(target.shape[-1]), generator=generator)
        else:
            target.fill_(1.0 if parameter.fill == "ones" else 0.0)
        progress.add(target.nbytes)
    filling.finish()


def fingerprint(path: Path, dtype: torch.dtype, load_format: str = "auto", variant: str = "baton") -> str:
    """Identifies a checkpoint quickly: a hash of the dtype, of `ModelConfig.variant`, of
    config.json, and of every safetensors file its header (names, shapes, dtypes, offsets) and 64 bytes from
    the start, middle and end of each tensor. Of a GGUF file: its header, which holds the configuration too,
    and such bytes.

    Two checkpoints that differ only in bytes between those samples get the same fingerprint; fine-tuning and
    re-quantization change every tensor, so that this does not happen by accident. 16 hexadecimal digits.
    """
    digest = hashlib.sha256(f"{dtype} {load_format} {variant}".encode())
    try:
        digest.update(opened(path).header if path.is_file() else (path / "config.json").read_bytes())
        for file in tensor_files(path) if load_format != "dummy" else []:
            file.sample(digest.update)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()[:16]
