"""Planted bugs of images: their digests, their embeddings, the pages that these lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import baton.kvcache.page_keys
from baton.engine.image_spans import ImageSpan
from baton.engine.images import ImageEncoder
from baton.sim.scenario_images import make_image_scenario
from baton.worker.encode.batches import EncodeBatches
from baton.worker.encode.pool import EmbeddingLease, EmbeddingPool, StoredEmbeddings
from baton.worker.images.pull_buffers import _Buffer
from planted.planting import Wrong, bug


@bug(
    "digest-cut",
    "cached pages of images are known by one bit of a digest",
    25,
    baton.kvcache.page_keys,
    "_seal",
    seed=1,
    scenario=make_image_scenario,
)
def _(seal: Wrong, page: Sequence[int]) -> bytes:
    found: bytes = seal([token % 2**33 for token in page])
    return found


def _over_at_once(lend: Wrong, pool: EmbeddingPool, image: ImageSpan) -> EmbeddingLease | None:
    lease: EmbeddingLease | None = lend(pool, image)
    if lease is not None:
        lease.deadline = 0.0
    return lease


@bug(
    "embeddings-reused",
    "pages of embeddings are reused while a pull reads them, and nobody is told",
    25,
    EmbeddingPool,
    "_evict",
    (EmbeddingPool, "lend", _over_at_once),
    seed=4,
    scenario=make_image_scenario,
)
def _(evict: Wrong, pool: EmbeddingPool, stored: StoredEmbeddings) -> None:
    leases, stored.leases = stored.leases, []
    evict(pool, stored)
    stored.leases = leases


@bug(
    "embeddings-unwritten",
    "embeddings are lent before they are in their pages",
    25,
    EncodeBatches,
    "_store",
    scenario=make_image_scenario,
)
async def _(store: Wrong, batches: EncodeBatches, each: Any, embeddings: Any) -> None:
    pool = batches._pool
    if pool.counts().free * pool._rows.shape[1] >= embeddings.nbytes:
        pool.keep(pool.take(each.image.digest, embeddings))
        each.done.set_result(None)
    else:
        await store(batches, each, embeddings)


@bug(
    "other-image",
    "a chunk of two images takes the embeddings of the one beside",
    25,
    ImageEncoder,
    "_embeddings",
    seed=1,
    scenario=make_image_scenario,
)
def _(embeddings: Wrong, encoder: ImageEncoder, images: Any) -> dict[bytes, Any]:
    found: dict[bytes, Any] = embeddings(encoder, images)
    for digest, beside in zip(found, list(found.values())[1:], strict=False):
        if beside.shape == found[digest].shape:
            found[digest] = beside
    return found


@bug(
    "pool-before",
    "embeddings are pulled from the pool that an encode node had in its life before",
    25,
    _Buffer,
    "pull",
    scenario=make_image_scenario,
)
def _(pull: Wrong, buffer: _Buffer, open_pool: Any, address: str, ready: Any) -> Any:
    if address in buffer.open:
        ends = (each.SerializeToString(deterministic=True) for each in ready.endpoints)
        buffer.open[address].key = b"".join(ends)
    return pull(buffer, open_pool, address, ready)
