"""The body of `engine.cuda_runner` for any decoder made of modules: they run one after the other over a
`ForwardBatch` whose tensors stay where they are. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.kvcache.pool import KvPool
from baton.layers.experts import Mixture
from baton.layers.forward_batch import AttendPages, ForwardBatch
from baton.layers.kernels.kv_write import write_kv
from baton.layers.rope import Rope
from baton.models.decoder import Decoder
from baton.models.device_mixture import device_mixture


@dataclass(slots=True)
class PagedStep:
    """Implements `forward_batch.Paged`."""

    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    caches: Sequence[torch.Tensor]
    attend: AttendPages
    ropes: dict[int, torch.Tensor]

    def rotation(self, rope: Rope) -> torch.Tensor:
        return self.ropes[id(rope)]


class ModuleBody:
    """Implements `body.Body`."""

    def __init__(self, model: Decoder, pool: KvPool, tables: torch.Tensor, context_length: int) -> None:
        """`tables`: int32 [slots, pages]; `context_length`: positions that will be used. Mixtures of experts
        get a form that does not wait for the host."""
        self._model = model
        self._tables = tables
        self._caches = [pool.pages[:, :, index] for index in range(pool.layout.num_layers)]
        self._options = model.attention_options
        self._layers = [pool.layer(index) for index in range(pool.layout.num_layers)]
        ropes = {layer.attention.rope for layer in model.layers}
        self._ropes = {id(rope): rope.halves(context_length, model.device) for rope in ropes if rope}
        for layer in model.layers:
            mixture = getattr(layer, "feed_forward", None)
            if isinstance(mixture, Mixture):
                mixture.kernels = device_mixture(mixture)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: AttendPages,
        wanted: torch.Tensor | None = None,
        *,
        decode: bool = False,
    ) -> torch.Tensor:
        def write_and_attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self._layers[layer]
            scales = self._options[layer].kv_scales
            write_kv(k, v, positions, slots, self._tables, keys, values, scales)
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            attend(layer, q, out)
            return out.flatten(1)

        paged = PagedStep(positions, slots, self._tables, self._caches, attend, self._ropes)
        hidden = self._model.forward(ForwardBatch(tokens, positions, write_and_attend, paged))
        return hidden if wanted is None else hidden.index_select(0, wanted)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._model.gathered(self._model.head(hidden))
        if self._model.shard.rank:
            return logits
        return logits.contiguous() if out is None else out.copy_(logits)
