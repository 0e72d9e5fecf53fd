"""EAGLE-3 heads: Li et al., arXiv:2503.01840. A decoder layer, or a few, that guesses the token after the
next from hidden states of three layers of a model and the next token.

Checkpoints are those of SafeAILab and SpecForge (LlamaForCausalLMEagle3), or of speculators
(speculators_model_type).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from baton.checkpoint_limits import read_json
from baton.layers.attention import Attention, AttentionOptions
from baton.layers.batch import Batch
from baton.layers.cache_spec import CacheSpec
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Mixture
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.models.body import use_one_row_products
from baton.models.config import ModelConfig, ModelError, make_rope
from baton.models.decoder import Decoder, DecoderLayer, prepare_linears
from baton.models.llama import feed_forward, llama_attention
from baton.models.loader import read_weights
from baton.models.tensor_files import tensor_files
from baton.models.whole_vocabulary import WholeVocabulary, read_whole

UNKNOWN = ("fc_norm", "norm_output", "use_mtp_layernorm", "parallel_drafting")
"""Variants, by their names in config.json, that are not computed here."""


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Whether this config.json is that of such a head."""
    named = any("Eagle3" in name for name in raw.get("architectures") or [])
    return raw.get("speculators_model_type") == "eagle3" or named or "draft_vocab_size" in raw


class Eagle3Layer:
    """The first layer: attends with what the embeddings and the hidden states, normalized, are together."""

    def __init__(self, config: ModelConfig, layer: Parameters, attention: Attention, before: bool) -> None:
        """`before`: the hidden states are normalized before they are kept as the residual."""
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RmsNorm(layer, "input_layernorm", hidden, eps)
        self.hidden_norm = RmsNorm(layer, "hidden_norm", hidden, eps)
        self.attention = attention
        self.post_norm = RmsNorm(layer, "post_attention_layernorm", hidden, eps)
        self.feed_forward: GatedMlp = feed_forward(config, layer, 0)
        self._before = before

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] each -> [tokens, hidden]; `hidden` may be overwritten."""
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_norm(embedded), normed), -1)
        hidden = self.attention.add_to(normed if self._before else hidden, both, batch)
        return self.feed_forward.add_to(hidden, self.post_norm(hidden))

    def write(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> None:
        """What a call does to the pool: a third of its work."""
        both = torch.cat((self.input_norm(embedded), self.hidden_norm(hidden)), -1)
        _, keys, values = self.attention.split(self.attention.input(both), batch)
        batch.attention.write(self.attention.index, keys, values)


class Eagle3Head:
    """Implements `engine.draft.draft_head.DraftHead`."""

    name = "eagle3"

    def __init__(self, raw: dict[str, Any], names: set[str], target: Decoder) -> None:
        """`raw`: its config.json; `names`: of its tensors, as `TensorFile.shapes` has them.
        Raises ModelError for what is not supported."""
        hf = _layer_config(raw)
        heads = hf.num_attention_heads
        self.config = config = replace(
            target.config,
            architecture="LlamaForCausalLMEagle3",
            hidden_size=hf.hidden_size,
            num_layers=hf.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
            head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
            rms_norm_eps=hf.rms_norm_eps,
            hf=hf,
        )
        for name in UNKNOWN:
            if raw.get(name):
                raise ModelError(f"EAGLE-3 heads with {name} are not supported")
        if not target.has_inner_states:
            raise ModelError(
                f"EAGLE-3 heads read states between layers, which {target.config.architecture} does not have"
                " as its checkpoint counts them: leave out --draft"
            )
        self.tap = _tap(raw, target.config.num_layers)
        self.parameters = parameters = Parameters(target.dtype, target.device)
        size, eps, rope = config.hidden_size, config.rms_norm_eps, make_rope(config)
        self.values = inputs = len(self.tap) * target.config.hidden_size
        self.mixtures: Sequence[Mixture] = ()
        before_fc = bool(raw.get("norm_before_fc"))
        self.input_norm = RmsNorm(parameters, "input_norm", inputs, eps) if before_fc else None
        self.fc = parameters.linear({"fc": size}, inputs, any(n == "fc.bias" for n in names))
        first = "midlayer" if any(name.startswith("midlayer.") for name in names) else "model.layers.0"
        bias = bool(getattr(hf, "attention_bias", False))
        norms = hf.model_type == "qwen3"
        attention = Attention(
            parameters.under(f"{first}.self_attn"),
            0,
            size,
            heads,
            config.num_kv_heads,
            config.head_dim,
            rope,
            inputs=2 * size,
            qkv_bias=bias,
            output_bias=bias,
            norm_eps=eps if norms else None,
        )
        self.first = Eagle3Layer(
            config, parameters.under(first), attention, bool(raw.get("norm_before_residual"))
        )
        self.others = []
        for index in range(1, config.num_layers):
            layer = parameters.under(f"model.layers.{index}")
            self.others.append(
                DecoderLayer(
                    RmsNorm(layer, "input_layernorm", size, eps),
                    llama_attention(
                        config, layer.under("self_attn"), index, rope, options=AttentionOptions(), norms=norms
                    ),
                    RmsNorm(layer, "post_attention_layernorm", size, eps),
                    feed_forward(config, layer, index),
                )
            )
        self.norm = RmsNorm(parameters, "model.norm", size, eps)
        embedding = "model.embed_tokens.weight"
        own_embedding = embedding in names
        if not own_embedding and size != target.config.hidden_size:
            raise ModelError(
                "an EAGLE-3 head of another hidden size than the model's lacks embed_tokens.weight"
            )
        self.embedding = parameters.tensor(embedding, hf.vocab_size, size) if own_embedding else None
        """None: the model's."""
        self._whole: WholeVocabulary | None = None
        """The model's, where each of its ranks has a part: one of them alone drafts."""
        self._target = target
        drafts = raw.get("draft_vocab_size") or hf.vocab_size
        self.head = parameters.linear({"lm_head": drafts}, size)
        self.tokens: torch.Tensor | None = None
        """int64 [draft vocabulary]: ids in the model's vocabulary; None: they are the same."""
        for name in ("d2t", "t2d", "verifier_"):
            parameters.ignore(name)
        self._rope = rope
        self._kernels = False
        self._scores: torch.Tensor | None = None
        """[rows, the model's vocabulary], -inf for tokens that are never drafted: of CUDA graphs."""

    @property
    def dtype(self) -> torch.dtype:
        return self._target.dtype

    @property
    def heads(self) -> int:
        return self.config.num_heads

    @property
    def attentions(self) -> Sequence[Attention]:
        found = [self.first.attention, *(layer.attention for layer in self.others)]
        return [each for each in found if isinstance(each, Attention)]

    @property
    def caches(self) -> list[CacheSpec]:
        return [each.cache for each in self.attentions]

    @property
    def attention_options(self) -> list[AttentionOptions]:
        return [each.options for each in self.attentions]

    def prepare(self) -> None:
        """Once its parameters are filled."""
        self._rope.prepare(self.config.used_length, self._target.dtype, self._target.device)
        prepare_linears(self.parameters)

    def use_kernels(self, context: int, rows: int) -> bool:
        target, self._kernels = self._target, True
        self._rope.prepare_kernels(context, target.device)
        if self.tokens is not None:
            shape = rows, target.config.vocab_size
            self._scores = torch.full(shape, -torch.inf, dtype=target.dtype, device=target.device)
        if self.dtype.itemsize == 2:
            use_one_row_products(self.parameters)
            first = self.first
            norms = [self.norm, first.input_norm, first.hidden_norm, first.post_norm]
            first.feed_forward.use_kernels()
            for layer in self.others:
                norms += (layer.input_norm, layer.post_norm)
            for norm in norms:
                norm.use_kernel()
        return True

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's states, [tokens, 3 of its hidden sizes] -> [tokens, hidden]"""
        return self.fc(hidden if self.input_norm is None else self.input_norm(hidden))

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Next tokens and hidden states before them -> hidden states at them, which take the place of the
        model's for the draft after the next; `hidden` may be overwritten."""
        hidden = self.first(self._embed(tokens), hidden, batch)
        for layer in self.others:
            hidden = layer(hidden, batch)
        return hidden

    def write(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> None:
        if self.others:
            self.forward(tokens, hidden, batch)
        else:
            self.first.write(self._embed(tokens), hidden, batch)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            return F.embedding(tokens, self.embedding)
        return (self._target if self._whole is None else self._whole).embed(tokens)

    def read_embedding(self, model: Path, load_format: str) -> None:
        """Where the model at this path has several ranks. Raises CheckpointError."""
        if self.embedding is None:
            self._whole = read_whole(self._target, model, load_format, head=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """-> [rows, the model's vocabulary], -inf for tokens that it never drafts: float32; with kernels in
        the model's dtype, and valid until the next call"""
        scores = self.head(self.norm(hidden))
        if not self._kernels:
            scores = scores.float()
        if self.tokens is None:
            return scores
        whole = self._scores
        if whole is None or len(whole) < len(scores):
            whole = scores.new_full((len(scores), self._target.config.vocab_size), -torch.inf)
        return whole[: len(scores)].index_copy_(1, self.tokens, scores)


def load_eagle3(
    path: Path, target: Decoder, model: Path | None = None, load_format: str = "auto"
) -> Eagle3Head:
    """`model`, `load_format`: of the target's checkpoint, needed where it has several ranks. Raises
    CheckpointError."""
    names, shift = set[str](), None
    for file in tensor_files(path):
        names.update(file.shapes())
        for _, _, found in file.read(["d2t"], ["d2t"]):
            assert isinstance(found, torch.Tensor)
            shift = found
    head = Eagle3Head(read_json(path / "config.json"), names, target)
    read_weights(path, head.parameters, lambda done, total: None)
    size = head.parameters.table["lm_head.weight"].shape[0]
    if shift is not None:
        head.tokens = (torch.arange(size) + shift.long()).to(target.device)
        if shift.shape != (size,) or head.tokens.min() < 0 or head.tokens.max() >= target.config.vocab_size:
            raise ModelError(f"{path}: d2t does not map {size} drafts into the model's vocabulary")
    elif size != target.config.vocab_size:
        raise ModelError(f"{path} has {size} drafts and no d2t that says which tokens they are")
    if model is not None:
        head.read_embedding(model, load_format)
    head.prepare()
    return head


def _layer_config(raw: dict[str, Any]) -> Any:
    """transformers' configuration of the layers."""
    from transformers import AutoConfig

    settings = dict(raw.get("transformer_layer_config") or raw)
    kind = settings.pop("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ModelError(f"EAGLE-3 heads with layers of {kind} are not supported, only of llama and qwen3")
    if settings.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"hidden_act {settings['hidden_act']!r} of EAGLE-3 heads is not supported, only 'silu'"
        )
    return AutoConfig.for_model(kind, **settings)


def _tap(raw: dict[str, Any], layers: int) -> tuple[int, ...]:
    """Before which of the model's layers the head reads hidden states. A list of speculators' says that; one
    in eagle_config names the layers behind which it reads. Raises ModelError."""
    inner = raw.get("eagle_config") or {}
    if not inner.get("use_aux_hidden_state", True):
        raise ModelError("EAGLE-3 heads without hidden states of inner layers are not supported")
    found = raw.get("eagle_aux_hidden_state_layer_ids")
    if not found and (behind := inner.get("eagle_aux_hidden_state_layer_ids")):
        found = [layer + 1 for layer in behind]
    found = found or [2, layers // 2, layers - 3]
    if any(not 0 <= layer <= layers for layer in found) or sorted(set(found)) != list(found):
        raise ModelError(f"an EAGLE-3 head reads before layers {found}, of which the model does not have all")
    return tuple(found)
