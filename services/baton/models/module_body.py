"""The body of `engine.cuda_runner` for any decoder made of modules: they run one after the other over a
`ForwardBatch` whose tensors stay where they are. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.kvcache.kv_groups import places
from baton.kvcache.kv_pool import PagePool
from baton.layers.forward_batch import ForwardBatch, Paged, Place
from baton.layers.moe import Mixture
from baton.layers.rope import Rope
from baton.models.body import Step
from baton.models.decoder import Decoder
from baton.models.device_mixture import device_mixture


class ModuleBody:
    """Implements `body.Body`."""

    def __init__(
        self, model: Decoder, pool: PagePool, tables: Sequence[torch.Tensor], context_length: int
    ) -> None:
        """`tables`: of each KV group int32 [slots, pages]; `context_length`: positions that will be used.
        Mixtures of experts get a form that does not wait for the host."""
        self._model = model
        of_layers = places(pool.layout.groups)
        layers = range(len(model.layers))
        self.tables = [tables[of_layers[layer][0]] for layer in layers]
        self.caches = [pool.layer_pages(layer) for layer in layers]
        ropes = {layer.attention.rope for layer in model.layers}
        self.ropes = {id(rope): rope.halves(context_length, model.device) for rope in ropes}
        for layer in model.layers:
            mixture = getattr(layer, "feed_forward", None)
            if isinstance(mixture, Mixture):
                mixture.kernels = device_mixture(mixture)

    def forward(self, step: Step) -> torch.Tensor:
        def place(layer: int, rope: Rope) -> Place:
            where = step.positions, step.slots, step.damage, self.tables[layer], self.caches[layer]
            return Place(*where, self.ropes[id(rope)])

        batch = ForwardBatch(step.tokens, step.positions, Paged(step.attend, place))
        hidden = self._model.forward(batch)
        return hidden if step.wanted is None else hidden.index_select(0, step.wanted)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._model.gathered(self._model.head(hidden))
        if self._model.shard.rank:
            return logits
        return logits.contiguous() if out is None else out.copy_(logits)
