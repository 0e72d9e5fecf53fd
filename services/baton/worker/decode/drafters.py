"""Which drafter a decode node has."""

from __future__ import annotations

import os

from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.draft.oracle import OracleDrafter
from baton.engine.draft.suffix import SuffixDrafter
from baton.kvcache import KvCacheManager
from baton.worker.draft_model import LoadedDrafter

ORACLE = "BATON_TEST_ORACLE"
"""Environment variable of tests and benchmarks: a file of continuations and, behind a colon, the share that
is not spoiled."""


def make_drafter(config: DecodeConfig, model: LoadedDrafter | None, cache: KvCacheManager) -> Drafter | None:
    """None: no row has drafts. `model`: the one with a model of its own, if the configuration names one.
    Raises ValueError with a readable line."""
    oracle = os.environ.get(ORACLE, "")
    if oracle and config.host not in ("127.0.0.1", "::1", "localhost"):
        raise ValueError(
            f"{ORACLE} is for tests: it works on the loopback interface only, not on {config.host}"
        )
    if config.draft == "off":
        return None
    if oracle:
        path, _, right = oracle.rpartition(":")
        return OracleDrafter.read(path, float(right)) if path else OracleDrafter.read(oracle)
    if config.draft_model:
        return model.drafter if model is not None else None
    return SuffixDrafter(cache)
