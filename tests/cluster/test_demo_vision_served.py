"""demo-vision through real processes: prefill and decode apart, with an encode node."""

from __future__ import annotations

from deployment import Deployment

from drawn_figures import wrong_answers

DRAWINGS = 200


async def test_fresh_drawings_are_named(tmp_path, deployments):
    deployment = Deployment.split(tmp_path, "demo-vision", gateway_flags=["--split", "always"])
    deployment.add_encode()
    with deployment:
        deployments.append(deployment)
        wrong = await wrong_answers(deployment.gateway.address, DRAWINGS, "real processes")
        print(wrong)
        assert all(len(named) <= DRAWINGS // 20 for named in wrong.values()), wrong
        assert all(node.load().encoded_images for node in deployment.of("encode"))
        deployment.assert_idle()
