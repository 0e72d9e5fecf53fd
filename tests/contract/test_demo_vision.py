"""demo-vision names drawings that it has not seen: split, with an encode node."""

from __future__ import annotations

from types import SimpleNamespace

from gateway_rig import gateway, tokenizer

from drawn_figures import wrong_answers
from image_nodes import running

SPLIT = {"split": "always", "log_level": "warning"}
DRAWINGS = 24


async def test_fresh_drawings_are_named():
    """At most one is named wrong, alone or beside another drawing."""
    async with (
        running("demo-vision", encode=1, page_size=16, token_budget=256, kv_tokens=4096) as cluster,
        tokenizer(model="demo-vision") as tokens,
        gateway(
            *(SimpleNamespace(address=node._address) for node in cluster.decode),
            tokenizer_address=tokens,
            prefill=tuple(node._address for node in cluster.prefill),
            encode=tuple(cluster.encoders),
            **SPLIT,
        ) as rig,
    ):
        wrong = await wrong_answers(rig.node.address, DRAWINGS, DRAWINGS, "in one process")
        print(wrong)
        assert all(len(named) <= 1 for named in wrong.values()), wrong
        (encoder,) = cluster.encode
        # Of three times as many: a busy node may be passed over for seconds.
        assert encoder.load().encoded_images >= DRAWINGS
