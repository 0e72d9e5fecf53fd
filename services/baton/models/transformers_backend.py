"""Any causal language model of transformers, by its own modelling code, over Baton's paged attention.

transformers' attention interface hands each layer's queries, keys and values to a function registered by
name; the one here writes them into the paged pool and attends. To the model all rows of a step are one
sequence; only attention tells them apart. Slower than a family of this package, and the reference for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.layers.attention import AttentionOptions
from baton.layers.batch import Batch
from baton.layers.cache_spec import CacheSpec, attention_cache
from baton.layers.tensor_parallel import ONE_RANK, Communicator
from baton.models.config import ModelConfig, ModelError, first_line

if TYPE_CHECKING:
    from baton.models.decoder import VisionTower

NAME = "baton"
"""Name of the attention function."""
_UNUSED = {"dropout", "position_ids", "is_causal", "use_cache"}
_KNOWN = {"scaling", "sliding_window", "softcap", "s_aux"} | _UNUSED
"""Options of the attention function that are served; those of `_UNUSED` change nothing here."""
_Options = dict[str, Any]
_Function = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None, _Options], Tensor]
"""(module, q [1, heads, tokens, dim], k and v [1, kv heads, tokens, dim], mask, options)
-> [1, tokens, heads, value dim]"""
_function: ContextVar[_Function] = ContextVar("baton_attention")


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    return _function.get()(module, query, key, value, attention_mask, options), None


class _NeedsValues(ModelError):
    """The model's code looks at numbers, which a model without memory does not have."""


def problem(hf: Any, architecture: str) -> str | None:
    """Why this model of transformers cannot be served; None: as far as that can be told without its weights,
    it can."""
    model = _auto_class(hf)._model_mapping.get(type(hf), None)
    if model is None or model.__name__ != architecture:
        return f"transformers has no causal language model {architecture}"
    if not model.is_backend_compatible():
        return "its code in transformers does not use the attention interface"
    ropes = getattr(hf.get_text_config(), "rope_parameters", None) or {}
    kinds = [each.get("rope_type") for each in (ropes, *ropes.values()) if isinstance(each, dict)]
    if "longrope" in kinds:
        return "its rotation (longrope) would depend on the other requests of a step"
    return None


def _auto_class(hf: Any) -> Any:
    """Which of transformers' classes makes the model: that of language models, else that of models which take
    images, too."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(hf) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return sum(parameter.nbytes for parameter in _without_memory(config, dtype).parameters())


def caches(config: ModelConfig) -> Sequence[CacheSpec]:
    """What each layer keeps, learnt from the model's code without its weights; by the configuration where
    the code needs values (dynamic rotation). Raises ModelError for a model whose code cannot be served."""
    try:
        # Products of experts are known without values in bfloat16 only.
        return TransformersModel(config, _without_memory(config, torch.bfloat16)).caches
    except _NeedsValues:
        return [attention_cache(None, config.num_kv_heads, config.head_dim)] * config.num_layers


def _without_memory(config: ModelConfig, dtype: torch.dtype) -> Any:
    try:
        with torch.device("meta"):
            return _untrained(config, dtype).eval()
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(f"transformers cannot make the model: {first_line(error)}") from error


def _untrained(config: ModelConfig, dtype: torch.dtype) -> Any:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return _auto_class(config.hf).from_config(config.hf, dtype=dtype, attn_implementation=NAME)


def check_names(path: Path, config: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Lets transformers load tensors without contents, as it renames and merges them. Raises ModelError if
    they are not those of the model. `shapes`: of the tensors in the files, by their names there."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    model = _without_memory(config, torch.bfloat16)
    meta = torch.device("meta")
    tensors = {
        name: torch.empty(tuple(shape), dtype=torch.bfloat16, device=meta) for name, shape in shapes.items()
    }
    try:
        renamed: Any = get_model_conversion_mapping(model)
        how = LoadStateDictConfig(dtype=torch.bfloat16, device_map={"": meta}, weight_mapping=renamed)
        info, _ = model._load_pretrained_model(model, tensors, None, how)
        model.mark_tied_weights_as_initialized(info)
        model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(info)
    except Exception as error:  # anything that transformers may raise for arbitrary tensors
        raise ModelError(f"{path} cannot be loaded by transformers: {first_line(error)}") from error
    _check_loaded(path, {**info.to_dict(), "conversion_errors": info.conversion_errors})


def _check_loaded(path: Path, info: Mapping[str, Any]) -> None:
    """Raises ModelError if a tensor of the model was not loaded: transformers makes up random ones."""
    wrong = (key for key, *_ in info["mismatched_keys"])
    if missing := sorted({*info["missing_keys"], *wrong, *info.get("conversion_errors", ())}):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks tensor {missing[0]}{more}, or has it in another shape")


def load(
    path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, dummy: bool
) -> TransformersModel:
    """`dummy`: random weights, always the same. Raises ModelError."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    try:
        if dummy:
            torch.manual_seed(0)
            model = _untrained(config, dtype)
        else:
            loaded: Any = _auto_class(config.hf).from_pretrained(
                path,
                config=config.hf,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=dtype,
                attn_implementation=NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused by name
            )
            model, info = loaded
            _check_loaded(path, info)
    except ModelError:
        raise
    except Exception as error:  # anything that transformers may raise for an arbitrary checkpoint
        raise ModelError(f"{path} cannot be loaded by transformers: {first_line(error)}") from error
    return TransformersModel(config, model.to(device).eval())


class _Seen(NamedTuple):
    """How a layer attends."""

    sizes: tuple[int, int, int]
    """Heads, KV heads, values of a head."""
    options: AttentionOptions


class TransformersModel:
    """A model of transformers with the interface of `Decoder`."""

    vision: VisionTower | None = None

    def __init__(self, config: ModelConfig, model: Any) -> None:
        """Learns from a pass over two tokens how each layer attends. Raises ModelError for a model whose
        layers do not all attend to earlier positions through the interface."""
        self._model = model
        self.device, self.dtype = model.device, model.dtype
        self.num_parameters = int(model.num_parameters())
        self._inputs_embeds: Tensor | None = None
        self._output: type[Any]
        self._base = model.base_model.forward
        model.base_model.forward = self._base_forward
        try:
            layers = self._learn(config)
        except ModelError:
            raise
        except (
            LookupError
        ) as error:  # its head calls the layers once more, by another way than the base model's
            raise ModelError(
                f"{config.architecture}: its layers attend outside of its base model's forward pass"
            ) from error
        except Exception as error:  # whatever the model's own code raises
            kind = _NeedsValues if "meta" in str(error) and self.device.type == "meta" else ModelError
            text = f"{config.architecture} does not run with paged attention: {first_line(error)}"
            raise kind(text) from error
        self.heads, self.shard = config.num_heads, ONE_RANK
        self.communicator: Communicator | None = None
        self.attention_options = [layer.options for layer in layers]
        heads, kv_heads, head_dim = layers[0].sizes
        self.caches = [attention_cache(layer.options.window, kv_heads, head_dim) for layer in layers]
        self.config = replace(config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)

    def set_kv_scales(self, scales: Tensor) -> None:
        pairs = zip(self.attention_options, scales, strict=True)
        self.attention_options = [replace(options, kv_scales=layer_scales) for options, layer_scales in pairs]

    def forward(self, batch: Batch) -> Tensor:
        """-> final hidden states [wanted tokens, hidden]"""
        write_and_attend = batch.attention.write_and_attend

        def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: _Options) -> Tensor:
            dim, width = q.shape[-1], v.shape[-1]
            if width < dim:
                v = F.pad(v, (0, dim - width))
            q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
            out = write_and_attend(module.layer_idx, q, k, v)
            return out.view(1, *q.shape)[..., :width]

        return batch.chosen(self._run(batch.tokens, batch.positions, attend))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, vocab], by whatever the model does behind its last layer."""
        self._inputs_embeds = hidden[None]
        try:
            logits: Tensor = self._model(inputs_embeds=self._inputs_embeds, use_cache=False).logits
        finally:
            self._inputs_embeds = None
        return logits[0].float()

    def reference_logits(self, tokens: Tensor) -> Tensor:
        """int [tokens], one sequence -> float32 [tokens, vocab], with transformers' own attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits
        finally:
            self._model.set_attn_implementation(NAME)
        return logits[0].float()

    def _run(self, tokens: Tensor, positions: Tensor, attend: _Function) -> Tensor:
        token = _function.set(attend)
        try:
            output = self._base(
                input_ids=tokens[None].long(), position_ids=positions[None].long(), use_cache=False
            )
        finally:
            _function.reset(token)
        self._output = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _base_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for the model without its head: while `logits` runs, it returns the given states."""
        if self._inputs_embeds is None:
            return self._base(*args, **kwargs)
        return self._output(last_hidden_state=self._inputs_embeds)

    @torch.inference_mode()
    def _learn(self, config: ModelConfig) -> list[_Seen]:
        seen: dict[int, _Seen] = {}
        name = config.architecture

        def note(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: _Options) -> Tensor:
            if mask is not None or not getattr(module, "is_causal", True):
                raise ModelError(f"{name}: its attention is not causal, or has a mask of its own")
            used = {name for name, value in options.items() if value is not None and value is not False}
            unknown = used - _KNOWN
            if unknown:
                raise ModelError(f"{name}: its attention has {', '.join(sorted(unknown))}")
            window = options.get("sliding_window") or None
            if window is not None and window >= config.used_length:
                window = None
            scale = options.get("scaling")
            if scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1) < 1e-6:
                scale = None
            if module.layer_idx in seen:
                raise ModelError(f"{name}: layer {module.layer_idx} attends more than once")
            attention_options = AttentionOptions(
                scale=scale, window=window, softcap=options.get("softcap"), sinks=options.get("s_aux")
            )
            seen[module.layer_idx] = _Seen((q.shape[1], k.shape[1], q.shape[-1]), attention_options)
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])

        tokens = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.logits(self._run(tokens, torch.arange(2, device=self.device), note))
        layers = [seen[index] for index in sorted(seen)]
        if sorted(seen) != list(range(config.num_layers)):
            found = f"{len(seen)} of {config.num_layers} layers attend through transformers' interface"
            raise ModelError(f"{name}: {found}")
        text = config.hf.get_text_config()
        window = getattr(text, "sliding_window", None)
        windowed = bool(window) and getattr(text, "use_sliding_window", True)
        types = getattr(text, "layer_types", None)
        if types is None:
            types = ["sliding_attention" if windowed else "full_attention"] * len(layers)
        short = (window or config.used_length) < config.used_length
        for kind, layer in zip(types, layers, strict=False):
            told = not short or layer.options.window is not None
            if kind != "full_attention" and not (kind == "sliding_attention" and told):
                raise ModelError(f"{name}: {kind} that its attention function is not told of")
        if len({layer.sizes for layer in layers}) > 1:
            raise ModelError(f"{name}: its layers have heads of different numbers or sizes")
        return layers
