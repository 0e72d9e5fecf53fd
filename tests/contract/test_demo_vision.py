"""demo-vision names drawings that it has not seen: split, each encoded by an encode node."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gateway_rig import gateway, tokenizer

from drawn_figures import wrong_answers
from image_nodes import running

SPLIT = {"split": "always", "log_level": "warning"}


@pytest.mark.parametrize("drawings", [24, pytest.param(200, marks=pytest.mark.thorough)])
async def test_fresh_drawings_are_named(drawings):
    """At most one of 24 is named wrong, alone or beside another drawing, and at most five of 200."""
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
        wrong = await wrong_answers(rig.node.address, drawings, f"{drawings} in one process")
        print(wrong)
        most = max(1, drawings // 40)
        assert all(len(named) <= most for named in wrong.values()), wrong
        (encoder,) = cluster.encode
        # Of each question one drawing is new, or two.
        assert encoder.load().encoded_images == 2 * drawings
