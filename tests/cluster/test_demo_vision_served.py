"""demo-vision through real processes: prefill and decode apart, with an encode node."""

from __future__ import annotations

from deployment import Deployment

from drawn_figures import wrong_answers

DRAWINGS, PAIRS = 200, 60


async def test_fresh_drawings_are_named(tmp_path, deployments):
    deployment = Deployment.split(tmp_path, "demo-vision", gateway_flags=["--split", "always"])
    deployment.add_encode()
    with deployment:
        deployments.append(deployment)
        wrong = await wrong_answers(deployment.gateway.address, DRAWINGS, PAIRS, "real processes")
        print(wrong)
        assert len(wrong["alone"]) <= DRAWINGS // 20 and len(wrong["one of two"]) <= PAIRS // 20, wrong
        assert all(node.load().encoded_images for node in deployment.of("encode"))
        deployment.assert_idle()
