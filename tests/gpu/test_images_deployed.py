"""demo-vision through processes on GPUs: prefill and decode apart, with an encode node and without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "cluster"))

from deployment import Deployment
from test_deployment import on_gpus

from drawn_figures import wrong_answers

DRAWINGS = 60
WORKER = ("--device", "cuda", "--kv-tokens", "8192", "--token-budget", "256", "--max-rows", "16")


@pytest.mark.parametrize("encode", [0, 1], ids=["in place", "encode node"])
async def test_fresh_drawings_are_named(tmp_path, encode):
    deployment = Deployment.split(tmp_path, "demo-vision", worker=WORKER, gateway_flags=("--split", "always"))
    for _ in range(encode):
        deployment.add_encode().forked = False
    with on_gpus(deployment):
        wrong = await wrong_answers(deployment.gateway.address, DRAWINGS, DRAWINGS, "on a GPU")
        print(wrong)
        assert all(len(named) <= DRAWINGS // 12 for named in wrong.values()), wrong
        assert all(node.load().encoded_images for node in deployment.of("encode"))
        deployment.assert_idle()
