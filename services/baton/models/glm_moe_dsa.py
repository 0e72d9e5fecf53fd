"""GLM-5: DeepSeek-V3.2's layers, some of which take the positions that the layer before them has chosen
(arXiv:2603.12201)."""

from __future__ import annotations

from baton.layers.parameters import Parameters
from baton.models.config import ModelConfig, ModelError
from baton.models.decoder import Decoder
from baton.models.deepseek_v32 import sparse_model


def build(config: ModelConfig, parameters: Parameters) -> Decoder:
    if config.hf.indexer_types[0] == "shared":
        raise ModelError("the first layer has no indexer, and there is none before it to share")
    return sparse_model(config, parameters, interleaved=True)
