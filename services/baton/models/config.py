"""What all decoders have in common, read from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from baton.checkpoint_config import context_length, end_token_ids
from baton.checkpoint_limits import check_sizes, read_json
from baton.gguf_file import opened
from baton.layers.cache_spec import State
from baton.layers.mlp import ACTIVATIONS
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, rope_of
from baton.model_path import CheckpointError
from baton.models.gguf_checkpoint import read_hf_config
from baton.models.pooling_config import MODULES
from baton.models.quantization_config import quantization_config, read_format
from baton.models.registry import FAMILIES, build, family


class ModelError(CheckpointError):
    """The model cannot be served; the message is one readable line."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Like `num_kv_heads` those of the first layer, where a family says HEADS_DIFFER."""
    rms_norm_eps: float
    context_length: int
    """Positions that the checkpoint was made for."""
    tied: bool
    """The output projection is the embedding."""
    dtype: torch.dtype
    """Dtype of the checkpoint's weights."""
    eos_token_ids: tuple[int, ...]
    hf: Any
    """transformers' configuration, for what only the family's module knows."""
    implementation: str
    """"baton": a family of this package; "transformers": its own code."""
    used_length: int
    """Positions that will be used."""
    embeds_only: bool = False
    """It has no head: a checkpoint of the body alone (…Model), or of sentence-transformers."""
    wrapper: str = ""
    """Name of the architecture whose language model this is, and whose other parts, such as a vision tower,
    are left out; empty: it is no part of another."""
    whole: Any = None
    """transformers' configuration of a model that takes more than text, where `hf` is that of its language
    model alone."""

    @property
    def variant(self) -> str:
        """What changes keys although the checkpoint's files are the same: whose code computes them, and which
        of longrope's factors."""
        rope = getattr(self.hf.get_text_config(), "rope_parameters", None) or {}
        original = rope.get("original_max_position_embeddings") or self.context_length
        long = rope.get("rope_type") == "longrope" and self.used_length > original
        return f"{self.implementation} long" if long else self.implementation


IMPLEMENTATIONS = ("auto", "baton", "transformers")
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Types of models in config.json that are another one under a name of their own."""


def read_config(path: Path, context_length: int | None = None, implementation: str = "auto") -> ModelConfig:
    """Reads config.json in the directory `path`, or the metadata of the GGUF file `path`. `context_length` is
    how far the model will be used, if less than it can. `implementation`: one of IMPLEMENTATIONS; "auto" is
    "baton" where there is a family for it.

    Raises CheckpointError for what is not supported, rather than computing something else.
    """
    from transformers import AutoConfig

    if not path.is_file() and not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: not a model in Hugging Face layout")
    try:
        if path.is_file():
            if implementation == "transformers":
                raise ModelError("GGUF files are served by Baton's own families only; leave out --model-impl")
            file = opened(path)
            hf, ends = read_hf_config(file), file.end_token_ids()
            check_sizes(path, hf.to_dict())
            implementation = "baton"
        else:
            raw = read_json(path / "config.json")
            check_sizes(path / "config.json", raw)
            alias = ALIASES.get(raw.get("model_type", ""))
            if alias is None:
                hf = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            else:
                hf = AutoConfig.for_model(alias, **{key: raw[key] for key in raw.keys() - {"model_type"}})
            named = (
                value
                for each in (hf, hf.get_text_config())
                for value in _listed(getattr(each, "eos_token_id", None))
            )
            ends = tuple(sorted({*named, *end_token_ids(path)}))  # transformers has defaults besides
        config = replace(_convert(hf, path, context_length, implementation), eos_token_ids=ends)
        if config.implementation == "baton":
            # Finds what the family refuses.
            model = build(config, Parameters(config.dtype, torch.device("meta")))
            if all(isinstance(cache, State) for cache in model.caches):
                raise ModelError(
                    f"{path}: no layer attends to tokens; recurrent layers alone are not supported"
                )
        return config
    except CheckpointError:
        raise
    except Exception as error:  # transformers and its validators may raise anything for an arbitrary file
        name = path if path.is_file() else path / "config.json"
        raise ModelError(f"{name} cannot be used: {first_line(error)}") from error


def _listed(value: int | list[int] | None) -> Iterable[int]:
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


def _convert(hf: Any, path: Path, wanted_length: int | None, implementation: str) -> ModelConfig:
    name, implementation = _choose(hf, implementation)
    quantization = {} if path.is_file() else quantization_config(path)
    method = quantization.get("quant_method")
    read_format(quantization)  # refuses what is not supported
    if quantization and implementation != "baton":
        raise ModelError(f"checkpoints quantized by {method!r} are served by Baton's own families only")
    if method == "mxfp4" and name != "GptOssForCausalLM":
        raise ModelError(
            f"checkpoints of {name} quantized by 'mxfp4' are not supported (quantization_config)"
        )
    if implementation == "baton":
        text = hf.get_text_config()
        states = any(hasattr(text, name) for name in _ACTIVATION_FIELDS)  # families with one alone do not
        if states and (activation := _activation(text)) not in ACTIVATIONS:
            known = ", ".join(sorted(ACTIVATIONS))
            raise ModelError(f"hidden_act {activation!r} is not supported; supported are {known}")
        if getattr(text, "pretraining_tp", 1) not in (1, None):
            raise ModelError("pretraining_tp other than 1 is not supported")
    text = hf.get_text_config()  # of a model that takes more than text, its language model's
    if not getattr(text, "is_causal", True):
        raise ModelError("attention to later positions (is_causal) is not supported")
    wrapper = ", ".join(getattr(hf, "architectures", None) or []) if text is not hf else ""
    embeds_only = _embeds_only(hf, path)
    first = _first_layer(text, name, implementation)
    heads = first.num_attention_heads
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise ModelError("num_attention_heads is not a multiple of num_key_value_heads")
    rope = getattr(text, "rope_parameters", None)
    most = context_length({"max_position_embeddings": text.max_position_embeddings, "rope_parameters": rope})
    return ModelConfig(
        architecture=name,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(first),
        rms_norm_eps=getattr(text, "rms_norm_eps", 0.0),
        context_length=most,
        tied=embeds_only or _is_tied(hf, path),
        dtype=_dtype(text if getattr(text, "dtype", None) is not None else hf, path),
        eos_token_ids=(),
        hf=hf if implementation == "transformers" else text,
        implementation=implementation,
        used_length=min(wanted_length or most, most),
        embeds_only=embeds_only,
        wrapper=wrapper,
        whole=hf,
    )


def _first_layer(text: Any, name: str, implementation: str) -> Any:
    """Configuration of the first layer, where layers have their own (per_layer_config). Raises ModelError if
    they differ in their heads, and whoever computes them expects one value."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    layers = [text.per_layer_config[index] for index in range(text.num_hidden_layers)]
    if implementation == "baton" and getattr(family(name), "HEADS_DIFFER", False):
        return layers[0]
    for field in ("head_dim", "num_attention_heads", "num_key_value_heads"):
        if len({getattr(layer, field, None) for layer in layers}) > 1:
            raise ModelError(f"layers with heads of different sizes are not supported ({field})")
    return layers[0]


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _is_tied(hf: Any, path: Path) -> bool:
    """Whether the output projection is the embedding. For wrappers the tensors say it: some state it for the
    whole, some for the language model, and published ones are at odds with transformers' defaults."""
    text = hf.get_text_config()
    if text is hf:
        return bool(hf.tie_word_embeddings)
    names = _tensor_names(path)
    if names:
        return not any(name.endswith("lm_head.weight") for name in names)
    return bool(getattr(hf, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False)))


def _embeds_only(hf: Any, path: Path) -> bool:
    """Whether the checkpoint is one for embeddings alone, by what it has beside its lack of a head: a model
    whose head was left out by mistake is one that lacks a tensor."""
    names = getattr(hf, "architectures", None) or []
    body = any(name.endswith("Model") and not name.endswith("LMHeadModel") for name in names)
    if not body and not (path / MODULES).is_file():
        return False
    return not any(name.endswith("lm_head.weight") for name in _tensor_names(path))


def _tensor_names(path: Path) -> set[str]:
    """Names in a directory's safetensors files, as far as they can be read; the loader tells the rest."""
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        try:
            with safe_open(file, framework="pt") as tensors:
                names.update(tensors.keys())
        except (SafetensorError, OSError):
            continue
    return names


def _choose(hf: Any, implementation: str) -> tuple[str, str]:
    """The architecture's name, and "baton" or "transformers". Raises ModelError."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from baton.models import transformers_backend

    names = list(getattr(hf, "architectures", None) or [])
    if len(names) == 1 and (headed := f"{names[0].removesuffix('Model')}ForCausalLM") in FAMILIES:
        names = [headed]
    name = ", ".join(names) or "(none named)"
    ours = len(names) == 1 and names[0] in FAMILIES
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ModelError(f"model implementation {implementation!r} is not known; known are {known}")
    if ours and implementation != "transformers":
        # A type that transformers does not know is that of a family of one's own.
        if (other := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf.model_type, name)) != name:
            raise ModelError(
                f"config.json is that of a {other} (model_type), but its architectures has {name}; "
                "correct the wrong one"
            )
        return name, "baton"
    if implementation != "transformers" and (inner := _language_model(hf)) is not None:
        return inner, "baton"
    supported = f"Baton's own are {', '.join(sorted(FAMILIES))}"
    if implementation == "baton":
        raise ModelError(f"architecture {name} is not one of Baton's own; {supported}")
    if problem := transformers_backend.problem(hf, name):
        raise ModelError(f"architecture {name} is not supported: {problem}; {supported}")
    return name, "transformers"


def _language_model(hf: Any) -> str | None:
    """The family that computes the language model of an architecture with further parts; None: none does."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = hf.get_text_config()
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    return name if text is not hf and name in FAMILIES else None


_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation")


def _activation(text: Any) -> str | None:
    return next(filter(None, (getattr(text, name, None) for name in _ACTIVATION_FIELDS)), None)


def require_silu(config: ModelConfig) -> None:
    """For families that compute no other activation. Raises ModelError."""
    if (activation := _activation(config.hf)) != "silu":
        name = config.architecture
        raise ModelError(f"hidden_act {activation!r} of {name} is not supported, only 'silu'")


def window(config: ModelConfig, index: int, *, everywhere: bool = False) -> int | None:
    """Positions that a token of this layer attends to, its own among them; None: all that will be used.
    `everywhere`: all layers have the window, and layer_types means nothing. Raises ModelError."""
    types = None if everywhere else getattr(config.hf, "layer_types", None)
    kind = types[index] if types else "sliding_attention"
    if kind not in ("full_attention", "sliding_attention"):
        raise ModelError(f"layer_types has {kind!r}; supported are full_attention and sliding_attention")
    size = getattr(config.hf, "sliding_window", None)
    if kind == "full_attention" or (size is None and not types):
        return None
    if size is None or size < 1:
        raise ModelError(f"layers have windows, but sliding_window is {size}; it is at least 1")
    return int(size) if size < config.used_length else None


def make_rope(config: ModelConfig, layer_type: str | None = None, *, partial: bool = False) -> Rope:
    """`layer_type`: where kinds of layers rotate differently; `partial`: a part of each head may be rotated.
    Raises ModelError."""
    try:
        rope = rope_of(config.hf, config.used_length, layer_type)
    except (ValueError, KeyError) as error:
        raise ModelError(f"rope_parameters of config.json cannot be used: {first_line(error)}") from error
    whole = getattr(config.hf, "qk_rope_head_dim", config.head_dim)
    if rope.dim > whole or (rope.dim < whole and not partial):
        name = config.architecture
        raise ModelError(
            f"{name} rotates {whole} values of a head, not {rope.dim} (partial_rotary_factor, head_dim)"
        )
    return rope


def _dtype(hf: Any, path: Path) -> torch.dtype:
    """That which config.json states, else that of most values in the first of the files with tensors;
    bfloat16 where neither says it: there are no tensors, or quantized ones alone."""
    dtype = getattr(hf, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if isinstance(dtype, torch.dtype):
        return dtype
    counts = dict.fromkeys(_DTYPES, 0)
    for file in sorted(path.glob("*.safetensors"))[:1]:
        try:
            with safe_open(file, framework="pt") as tensors:
                for part in (tensors.get_slice(name) for name in tensors.keys()):  # noqa: SIM118 (not a dict)
                    if part.get_dtype() in counts:
                        counts[part.get_dtype()] += math.prod(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    most = max(counts, key=counts.__getitem__)
    return _DTYPES[most] if counts[most] else torch.bfloat16


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Data types by their names in safetensors files."""


def first_line(error: BaseException) -> str:
    """First line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
