"""One of two gateways is killed while streams run: baton.client goes on at the other."""

from __future__ import annotations

import asyncio

from stress.gateways import kill_gateways, two_gateways

KILLS = 4


def test_every_stream_goes_on_at_the_other_gateway(tmp_path, deployments):
    with two_gateways(tmp_path, "demo") as deployment:
        deployments.append(deployment)
        seen = asyncio.run(kill_gateways(deployment, kills=KILLS, streams=8, count=10, max_tokens=150))
        assert not seen.problems, "\n".join(seen.problems)
        assert seen.kills == KILLS and seen.resumed >= KILLS, seen
        assert seen.longest_pause < 30.0, seen
        deployment.assert_idle()
