"""A request that ends the nodes that compute it: it fails, with a reason of its own, and all others go on."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployment import Deployment
from process import EXIT_SECONDS

from baton.rpc.errors import BatonError

POISON = 666
PRELUDE = f"""
import os
import baton.engine.scheduler as scheduler

commit = scheduler.Scheduler.commit

def poisoned(self, step, result, *seconds):
    if any(record.sequence.request.params.seed == {POISON} for record in step.records):
        if "BATON_TEST_SILENT" in os.environ:
            os.abort()
        raise AssertionError("poison")
    commit(self, step, result, *seconds)

scheduler.Scheduler.commit = poisoned
"""
SILENT = [-signal.SIGABRT] * 3


@pytest.mark.parametrize(("split", "codes"), [(False, [70] * 2), (True, [70] * 2), (False, SILENT)])
def test_a_poison_request_ends_few_nodes_and_no_stream(tmp_path, monkeypatch, split, codes):
    """Two; three where they cannot say by which request."""
    if codes == SILENT:
        monkeypatch.setenv("BATON_TEST_SILENT", "1")
    counts = {"prefill": 3, "decode": 1} if split else {"prefill": 0, "decode": 4}
    deployment = Deployment.split(tmp_path, "demo", **counts)
    poisoned = deployment.of("prefill" if split else "decode")
    for process in poisoned:
        process.prelude = PRELUDE
    deployment.start()
    client = deployment.client()
    prompts = [f"{number} " * 60 for number in range(8)]
    try:
        with ThreadPoolExecutor(9) as pool:
            others = [
                pool.submit(client.generate, prompt, max_tokens=300, seed=1, stop_token_ids=[])
                for prompt in prompts
            ]
            with pytest.raises(BatonError) as raised:
                client.generate("poison " * 60, max_tokens=50, seed=POISON)
            finished = [other.result(timeout=120) for other in others]
        assert raised.value.reason == "REPEATED_STEP_FAILURE", raised.value
        assert all(completion.text for completion in finished)
        deadline = time.monotonic() + EXIT_SECONDS
        while sum(not process.alive for process in poisoned) < len(codes) and time.monotonic() < deadline:
            time.sleep(0.02)  # the second tells the client's gateway first, then it ends
        ended = [process for process in poisoned if not process.alive]
        assert [process._popen.poll() for process in ended] == codes
    finally:
        deployment._abandon()
