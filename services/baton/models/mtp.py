"""Multi-token prediction: DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 2.2. A checkpoint's own layer
that guesses the token after the next from the model's final hidden states and the next token, with the
model's embedding and head.

Behind the first guess it takes its own normalized states for the model's. Of several such layers the first
makes all guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from baton.layers.attention import AttentionModule, AttentionOptions
from baton.layers.batch import FINAL, Batch
from baton.layers.cache_spec import CacheSpec
from baton.layers.moe import Mixture
from baton.layers.parameters import Parameters
from baton.models.body import use_one_row_products
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder, prepare_linears
from baton.models.loader import fill_at_random, read_weights
from baton.models.mtp_layer import MtpLayer
from baton.models.registry import family
from baton.models.tensor_files import tensor_files
from baton.models.whole_vocabulary import WholeVocabulary, read_whole


class MtpHead:
    """Implements `engine.draft.draft_head.DraftHead`."""

    name = "mtp"

    tap: tuple[int, ...] = (FINAL,)

    def __init__(
        self,
        target: Decoder,
        layer: MtpLayer,
        parameters: Parameters,
        whole: WholeVocabulary | None = None,
    ) -> None:
        """`parameters`: the layer's; `whole`: see `read_whole`."""
        self._target, self._layer, self.parameters = target, layer, parameters
        self._vocabulary = target if whole is None else whole
        self.values = target.config.hidden_size
        self.mixtures: Sequence[Mixture] = [found] if (found := layer.layer.mixture) is not None else []
        attention = layer.layer.attention
        assert isinstance(attention, AttentionModule) and attention.cache is not None
        self._attention = attention
        self.caches: list[CacheSpec] = [attention.cache]

    @property
    def dtype(self) -> torch.dtype:
        return self._target.dtype

    @property
    def heads(self) -> int:
        return self._target.config.num_heads

    @property
    def attention_options(self) -> list[AttentionOptions]:
        return [self._attention.options]

    def prepare(self) -> None:
        """Once its parameters are filled."""
        target = self._target
        self._attention.rope.prepare(target.config.used_length, target.dtype, target.device)

    def use_kernels(self, context: int, rows: int) -> bool:
        if self.dtype.itemsize == 2:
            use_one_row_products(self.parameters)
        return False

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's final normalized states [tokens, hidden], as they are."""
        return hidden

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Next tokens and hidden states before them -> normalized hidden states at them."""
        mtp = self._layer
        both = torch.cat((mtp.token_norm(self._vocabulary.embed(tokens)), mtp.hidden_norm(hidden)), -1)
        return mtp.norm(mtp.layer(mtp.input(both), batch))

    def write(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch) -> None:
        self.forward(tokens, hidden, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """-> float32 [rows, vocab]"""
        return self._vocabulary.logits(hidden)


def check_mtp(path: Path, config: ModelConfig, load_format: str = "auto") -> None:
    """Raises ModelError if the checkpoint has no such layer, or one that is not supported."""
    build = config.implementation == "baton" and getattr(family(config.architecture), "build_mtp", None)
    if not build or path.is_file():
        what = "GGUF files" if path.is_file() else config.architecture
        raise ModelError(f"no layers of multi-token prediction (mtp) are read of {what}")
    parameters = Parameters(config.dtype, torch.device("meta"))
    build(config, parameters)
    if load_format == "dummy":
        return
    stored = {name for file in tensor_files(path) for name in file.shapes()}
    if not stored & parameters.table.keys():
        raise ModelError(f"{path} has no layer of multi-token prediction (mtp)")


def load_mtp(path: Path, target: Decoder, load_format: str = "auto") -> MtpHead:
    """`path`: the model's checkpoint, which `check_mtp` has seen. With several ranks, too, the head is
    whole. Raises CheckpointError."""
    parameters = Parameters(target.dtype, target.device, plan=target.parameters.plan)
    parameters.ignore("")  # the model's own tensors
    layer = family(target.config.architecture).build_mtp(target.config, parameters)
    head = MtpHead(target, layer, parameters, read_whole(target, path, load_format, head=True))
    if load_format == "dummy":
        fill_at_random(parameters, lambda done, total: None)
    else:
        read_weights(path, parameters, lambda done, total: None)
    prepare_linears(parameters)
    head.prepare()
    return head
