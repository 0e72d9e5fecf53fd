"""A decoder: embedding, layers, norm and head; the forward pass over a ragged batch on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from baton.layers.attention import Attention, AttentionModule, AttentionOptions
from baton.layers.batch import FINAL, Batch
from baton.layers.cache_spec import CacheSpec, State
from baton.layers.gated_delta_net import GatedDeltaNet
from baton.layers.linear import Linear, Transposed, WeightLayout, fastest_layout, fastest_product
from baton.layers.mla import MlaAttention
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Mixture
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.quantization.cpu import MakeProduct
from baton.layers.quantization.weight_method import QuantizedWeight
from baton.layers.recurrent import RecurrentModule
from baton.layers.rope import Rope
from baton.layers.short_convolution import GatedConvolution
from baton.layers.tensor_parallel import Communicator, Shard
from baton.models.config import ModelConfig
from baton.models.device_mixture import kernels_know


class LanguageModel(Protocol):
    """What a runner needs of a model: a `Decoder`, or one of `transformers_backend`."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    shard: Shard
    communicator: Communicator | None
    """Communicator of the ranks that share the model; None: there is one."""
    heads: int
    """Attention heads of each layer, on this rank."""
    vision: VisionTower | None
    """Makes embeddings of images; None: the model sees none."""

    @property
    def num_parameters(self) -> int: ...

    @property
    def attention_options(self) -> Sequence[AttentionOptions]: ...

    @property
    def caches(self) -> Sequence[CacheSpec]:
        """What each layer keeps; those that share another's keys and values come last, and are left out."""
        ...

    def set_kv_scales(self, scales: torch.Tensor) -> None:
        """The pool holds keys and values in FP8, divided by these: float32 [layers, 2, kv heads]."""
        ...

    def forward(self, batch: Batch) -> torch.Tensor:
        """-> final normalized hidden states [wanted tokens, hidden]"""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class VisionTower(Protocol):
    merge: int
    """Patches of an image's height, and of its width, that make one token."""
    patch: int
    """Pixels of a patch's height and width."""
    values: int
    """That `encode` makes of a token, in all parts."""
    parts: int
    """1 + k: see `InputEmbeddings`."""
    dtype: torch.dtype
    device: torch.device

    def encode(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """uint8 [height, width, 3] each -> of each `InputEmbeddings.rows`, [1 + k, tokens, hidden], its
        tokens by rows of the image."""
        ...


class FeedForward(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        ...


class Layer(Protocol):
    @property
    def attention(self) -> AttentionModule | RecurrentModule: ...

    @property
    def mixture(self) -> Mixture | None: ...

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]; `hidden` may be overwritten."""
        ...


class LayerBody(Protocol):
    """How a layer is computed in a forward pass: by its modules, or by kernels that also do a part of what
    belongs to the layer behind it."""

    def forward(self, residual: torch.Tensor, x: Any, batch: Batch) -> tuple[torch.Tensor, Any]:
        """residual [tokens, hidden], which may be overwritten -> the same behind the layer, and the same
        normalized as the next body takes it; None: not done. `x` is what the body before gave. If the last
        one gives the final states, they are those of the tokens that are wanted; with a tap of all."""
        ...


class ModuleBody:
    """The layer's modules, one after the other."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def forward(self, residual: torch.Tensor, x: Any, batch: Batch) -> tuple[torch.Tensor, None]:
        return self._layer(residual, batch), None


class DecoderLayer:
    """hidden += attention(norm(hidden)); hidden += feed_forward(norm(hidden))"""

    def __init__(
        self,
        input_norm: RmsNorm,
        attention: AttentionModule | RecurrentModule,
        post_norm: RmsNorm,
        feed_forward: FeedForward,
    ) -> None:
        self.input_norm, self.attention = input_norm, attention
        self.post_norm, self.feed_forward = post_norm, feed_forward

    @property
    def mixture(self) -> Mixture | None:
        return self.feed_forward if isinstance(self.feed_forward, Mixture) else None

    def __call__(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        hidden = self.attention.add_to(hidden, self.input_norm(hidden), batch)
        return self.feed_forward.add_to(hidden, self.post_norm(hidden))


class Decoder:
    """A decoder on one device; can be used once its parameters are filled and `prepare` was called."""

    def __init__(
        self,
        config: ModelConfig,
        parameters: Parameters,
        layers: Sequence[Layer],
        *,
        norm_plus_one: bool = False,
        embedding_scale: float | None = None,
        logit_softcap: float | None = None,
        logit_divisor: float = 1.0,
    ) -> None:
        """Declares embedding, final norm and head under the names that all families use.

        `embedding_scale` multiplies the embeddings; logits are divided by `logit_divisor` and become
        logit_softcap * tanh(logits / logit_softcap). Layers that write no keys and values come last.
        """
        self.config = config
        self.layers = layers
        self.bodies: Sequence[LayerBody] = [ModuleBody(layer) for layer in layers]
        self.device, self.dtype = parameters.device, parameters.dtype
        self.parameters = parameters
        # Rounded to the model's dtype, as embeddings are.
        self._embedding_scale = (
            torch.tensor(embedding_scale).to(self.dtype).item() if embedding_scale else None
        )
        self._logit_softcap, self._logit_divisor = logit_softcap, logit_divisor
        self.vision: VisionTower | None = None
        self._writing = [layer for layer in layers if layer.attention.cache is not None]
        assert [layer.attention.index for layer in self._writing] == list(range(len(self._writing)))
        size, hidden = config.vocab_size, config.hidden_size
        self.shard, self.communicator = parameters.shard, parameters.communicator
        self.heads = config.num_heads // self.shard.size
        self._own_tokens = vocabulary_range = self.shard.vocabulary(size)
        rows, cut = self.shard.vocabulary_rows(size), self.shard.cut(0, vocabulary_range)
        name, shape = "model.embed_tokens.weight", torch.Size([size, hidden])
        kept = None
        if config.tied and parameters.plan.stored is not None and not parameters.plan.on_gpu:
            kept = parameters.plan.method_of([name], hidden)
        self.embedding: torch.Tensor | QuantizedWeight
        if kept is not None:
            self.embedding = QuantizedWeight(kept, rows, hidden, self.device)
            self.embedding.clear(vocabulary_range[1])
            parameters.add(name, self.embedding.rows(0, vocabulary_range[1]), shape=shape, cut=cut)
        else:
            self.embedding = parameters.empty(rows, hidden)
            self.embedding[vocabulary_range[1] :].zero_()
            parameters.add(name, self.embedding[: vocabulary_range[1]], shape=shape, cut=cut)
        self.norm = RmsNorm(parameters, "model.norm", hidden, config.rms_norm_eps, norm_plus_one)
        if config.tied:
            method = parameters.plan.method_of([], hidden) if parameters.plan.head else None
            quantized = QuantizedWeight(method, rows, hidden, self.device) if method is not None else None
            self.head = Linear(self.embedding if quantized is None else quantized)
            """The head's weight is the embedding if the checkpoint ties them, or made of that."""
            parameters.linears.append(self.head)
            parameters.ignore("lm_head.weight")
        else:
            self.head = parameters.linear(
                {"lm_head": size}, hidden, quantize=parameters.plan.head, rows={"lm_head": [vocabulary_range]}
            )

    @property
    def attention_options(self) -> list[AttentionOptions]:
        """Attention options of each layer in `caches`."""
        return [layer.attention.options for layer in self._writing]

    @property
    def caches(self) -> list[CacheSpec]:
        """What each layer keeps; see `LanguageModel`."""
        return [cache for layer in self._writing if (cache := layer.attention.cache) is not None]

    @property
    def recurrent(self) -> list[RecurrentModule]:
        modules = (layer.attention for layer in self.layers)
        return [module for module in modules if isinstance(module, RecurrentModule)]

    @property
    def mixtures(self) -> list[Mixture]:
        return [mixture for layer in self.layers if (mixture := layer.mixture) is not None]

    @property
    def has_inner_states(self) -> bool:
        """Whether its layers are the checkpoint's: some families make two of one, or one of two."""
        return len(self.layers) == self.config.num_layers

    @property
    def ropes(self) -> set[Rope]:
        """The layers' rotations."""
        return {layer.attention.rope for layer in self.layers if layer.attention.rope is not None}

    def set_kv_scales(self, scales: torch.Tensor) -> None:
        for layer, layer_scales in zip(self._writing, scales, strict=True):
            layer.attention.options = replace(layer.attention.options, kv_scales=layer_scales)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the memory that is allocated for weights."""
        quantized = self.head.quantized if self.config.tied else None
        return self.parameters.nbytes + (
            quantized.nbytes if quantized is not None and quantized is not self.embedding else 0
        )

    @property
    def num_parameters(self) -> int:
        """Number of weights; tied ones count once."""
        return sum(parameter.shape.numel() for parameter in self.parameters.table.values())

    def prepare(self) -> None:
        """Computes the rotations of all positions, and on a CPU brings the matrices into the layout that
        computes fastest, one by one."""
        positions = self.config.used_length
        for rope in self.ropes:
            rope.prepare(positions, self.dtype, self.device)
        if self.config.tied and self.head.quantized is not None and isinstance(self.embedding, torch.Tensor):
            self.head.quantized.fill(0, self.embedding)
        prepare_linears(self.parameters)
        if self.device.type == "cpu":
            for parameter in self.parameters.table.values():  # what has been packed is held no more
                parameter.target = torch.empty(0, device="meta")
            if self.config.tied and self.dtype.itemsize > 2 and isinstance(self.embedding, torch.Tensor):
                self.embedding = narrowed(self.embedding)

    def forward(self, batch: Batch) -> torch.Tensor:
        """-> final normalized hidden states [wanted tokens, hidden]"""
        hidden, inputs, tap = self.embed(batch.tokens), batch.embeddings, batch.tap
        x = None
        added: list[torch.Tensor] = []
        if inputs is not None:
            rows, *added = inputs.rows.unbind(0)
            hidden = hidden.index_copy(0, inputs.at, rows)
        for index, body in enumerate(self.bodies):
            if tap is not None and self.has_inner_states:
                tap.take(index, hidden)
            hidden, x = body.forward(hidden, x, batch)
            if inputs is not None and index < len(added):
                hidden, x = hidden.index_add(0, inputs.at, added[index]), None
        final: torch.Tensor = self.norm(hidden) if x is None else x
        if tap is not None:
            tap.take(self.config.num_layers, hidden)
            tap.take(FINAL, final)
        return batch.chosen(final) if x is None or tap is not None else final

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeds tokens, on all ranks together: [tokens] -> [tokens, hidden]."""
        return self.scaled(self._looked_up(tokens))

    def scaled(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, as layers take them."""
        return hidden if self._embedding_scale is None else hidden * self._embedding_scale

    def _looked_up(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.communicator is None:
            return self._rows(tokens)
        first, count = self._own_tokens
        local = tokens - first
        others = (local < 0) | (local >= count)
        hidden = self._rows(local.masked_fill(others, 0))
        return self.communicator.all_reduce(hidden.masked_fill_(others[:, None], 0))

    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's embedding."""
        if isinstance(self.embedding, QuantizedWeight):
            return self.embedding.selected(tokens).to(self.dtype)
        return F.embedding(tokens, self.embedding).to(self.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]; with several ranks on rank 0, [rows, 0] on others."""
        return self.gathered(self.head(hidden).float())

    @property
    def plain_logits(self) -> bool:
        """Whether logits are what the head gives."""
        scaled = self._logit_divisor != 1 or self._logit_softcap is not None or self.head.bias is not None
        return self.communicator is None and not scaled

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """What this rank's head gave -> as `logits`, in the same dtype."""
        logits = self.finished(logits)
        if self.communicator is None:
            return logits
        rows = self.shard.vocabulary_rows(self.config.vocab_size)
        if rows > logits.shape[1]:
            logits = F.pad(logits, (0, rows - logits.shape[1]))
        return self.communicator.gather(logits)[:, : self.config.vocab_size]

    def finished(self, logits: torch.Tensor) -> torch.Tensor:
        """What a head gave, divided and capped; any part of the vocabulary."""
        if self._logit_divisor != 1:
            logits = logits / self._logit_divisor
        if (cap := self._logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits


def prepare_linears(parameters: Parameters) -> None:
    """Once they are filled: on a GPU gives quantized ones their kernels, on a CPU brings each into the layout
    that computes fastest. With several ranks nothing is measured: layouts round differently, and what all
    ranks compute, such as which experts a token has, must have the same bits everywhere."""
    dtype, several = parameters.dtype, parameters.shard.size > 1
    if parameters.device.type == "cuda":
        for linear in parameters.linears:
            if linear.quantized is not None:
                from baton.layers.kernels.quantized_linear import KernelProduct

                linear.use(KernelProduct, dtype)
    if parameters.device.type != "cpu":
        return
    layouts: dict[tuple[torch.Size, torch.dtype], WeightLayout] = {}
    products: dict[tuple[int, int, tuple[int, int]], MakeProduct] = {}
    for linear in parameters.linears:
        weight, quantized = linear.weight, linear.quantized
        if quantized is not None:
            key = quantized.bits, quantized.group, quantized.shape
            if key not in products:
                products[key] = fastest_product(quantized, dtype, measure=not several)
            linear.pack_quantized(products[key], dtype)
            continue
        assert weight is not None
        kind = weight.shape, weight.dtype
        if kind not in layouts:
            layouts[kind] = Transposed if several else fastest_layout(weight)
        linear.pack(layouts[kind])


def narrowed(embedding: torch.Tensor) -> torch.Tensor:
    """In 16 bits a number if they hold each exactly, as those of a checkpoint of 16 bits do. A tied head that
    has been packed is another copy, in a layout that no row can be read from."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = torch.empty_like(embedding, dtype=dtype)
        pieces = zip(torch.split(embedding, 4096), torch.split(narrow, 4096), strict=True)
        if all(torch.equal(piece, part.copy_(piece).to(piece.dtype)) for piece, part in pieces):
            return narrow
    return embedding


def plain_layers(decoder: LanguageModel) -> list[DecoderLayer] | None:
    """The layers if all are like those of Llama or of DeepSeek, of 16 bits: heads of one number and size,
    rotated alike, wholly or in part, or latents, or short convolutions or Gated DeltaNet with one projection
    before it; a gated SiLU layer or a mixture of such or of gpt-oss' experts; else None."""
    if not isinstance(decoder, Decoder):
        return None
    layers = [layer for layer in decoder.layers if type(layer) is DecoderLayer and _plain(layer)]
    sizes = {(cache.heads, cache.head_dim) for cache in decoder.caches if not isinstance(cache, State)}
    attending = [layer.attention for layer in layers if not isinstance(layer.attention, RecurrentModule)]
    same = len({id(attention.rope) for attention in attending}) == len(sizes) == 1
    return layers if same and len(layers) == len(decoder.layers) else None


def _plain(layer: DecoderLayer) -> bool:
    attention = layer.attention
    known = type(attention) in (Attention, MlaAttention, GatedConvolution)
    if isinstance(attention, GatedDeltaNet):
        known = attention.gates is None
    module = layer.feed_forward
    if isinstance(module, Mixture):
        return known and kernels_know(module)
    return known and isinstance(module, GatedMlp) and module.activation == "silu"
