"""What `engine.model_runner` runs of a model: its forward pass over a step's batch, and its head.

With a GPU's kernels everything that differs between steps is in tensors on the device, and nothing waits for
the host, so that a CUDA graph can hold it; plain layers have fused bodies (`fused_layer`).
"""

from __future__ import annotations

import torch

from baton.layers.batch import Batch
from baton.layers.parameters import Parameters
from baton.models.decoder import Decoder, DecoderLayer, LanguageModel, plain_layers


def why_not_fused(model: LanguageModel) -> str | None:
    """Why the model's layers have no fused bodies; None: they have."""
    if model.dtype not in (torch.bfloat16, torch.float16):
        return f"fused kernels compute bfloat16 and float16, not {str(model.dtype).removeprefix('torch.')}"
    if plain_layers(model) is None:
        return f"{model.config.architecture} has layers that fused kernels do not know"
    return None


def _use_kernels(model: Decoder) -> None:
    """Gives the modules of layers without a fused body kernels for norms and for products of one row."""
    use_one_row_products(model.parameters)
    model.norm.use_kernel()
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):
            layer.input_norm.use_kernel()
            layer.post_norm.use_kernel()


def use_one_row_products(parameters: Parameters) -> None:
    """Gives plain weights of 16 bits a kernel for products of one row, on a Hopper GPU."""
    from baton.layers.kernels.gemv import OneRowProduct

    for linear in parameters.linears:
        if linear.weight is not None and linear.weight.dtype == parameters.dtype:
            linear.use_kernels(OneRowProduct(linear))


class Body:
    def __init__(
        self, model: LanguageModel, kernels: bool, context_length: int, invariant: bool = False
    ) -> None:
        """`kernels`: the layers write into the pool by kernels of their own (`Batch.caches`);
        `context_length`: positions that will be used; `invariant`: a token is computed in the same order
        whatever else is in the step. Raises ValueError if that cannot be."""
        self._model, self._invariant = model, invariant
        self._kernels = model if kernels and isinstance(model, Decoder) else None
        problem = why_not_fused(model) if kernels else "it needs kernels for GPUs"
        if invariant and problem is not None:
            raise ValueError(problem)
        if self._kernels is None:
            return
        for rope in self._kernels.ropes:
            rope.prepare_kernels(context_length, model.device)
        if problem is None:
            from baton.models.fused_layer import fuse_layers

            fuse_layers(self._kernels, invariant)
            return
        if model.dtype != torch.float32:
            _use_kernels(self._kernels)
        from baton.models.device_mixture import device_mixture

        for mixture in self._kernels.mixtures:
            mixture.kernels = device_mixture(mixture)

    def forward(self, batch: Batch) -> torch.Tensor:
        """-> final normalized hidden states [wanted tokens, hidden]. Writes keys and values of all tokens
        into the pool."""
        return self._model.forward(batch)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], into `out` if given: float32, with kernels in the model's dtype;
        with several ranks on rank 0, [rows, 0] on others."""
        model = self._kernels
        if model is None:
            return self._model.logits(hidden)
        into = out if model.plain_logits else None
        if self._invariant:
            from baton.layers.kernels.batch_invariant_matmul import matmul

            logits = matmul(hidden, model.head, into)
        elif into is not None:
            model.head.into(hidden, into)
            logits = into
        else:
            logits = model.head(hidden)
        if into is not None:
            return logits
        logits = model.gathered(logits)
        if model.shard.rank:
            return logits
        return logits.contiguous() if out is None else out.copy_(logits)
