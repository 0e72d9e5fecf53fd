"""What a gateway logs and counts of each request, also of those that it refuses before they are one."""

from __future__ import annotations

import httpx
import pytest
from gateway_rig import Stream, gateway, until
from prometheus_client.parser import text_string_to_metric_families
from scripted_decode import ScriptedDecode, saying
from structlog.testing import capture_logs
from test_gateway_authentication import ALICE, BODY, SECRET, key_file, post, private

from baton.v1 import inference_pb2

SECRETS = ("hello", "zyzzyva", ALICE, SECRET)
TOKEN = "a-token-for-metrics-only"


async def scrape(rig, secret: str = "") -> dict[tuple[str, ...], float]:
    """(series, label values by label name...) -> value."""
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        answer = await http.get(f"{rig.http}/metrics", headers=headers)
    answer.raise_for_status()
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_a_request_has_one_line_with_its_whole_story(tmp_path):
    with capture_logs() as lines:
        async with (
            ScriptedDecode(saying([5, 6])) as decode,
            gateway(
                decode, api_keys=key_file(tmp_path), cluster_secret_file=private(tmp_path / "secret", SECRET)
            ) as rig,
        ):
            assert (await post(rig, ALICE)).status_code == 200
            await rig.idle()
            found = await scrape(rig, SECRET)
    (line,) = [line for line in lines if line["event"] in ("finished", "refused", "failed")]
    assert line["event"] == "finished"
    assert {name: line[name] for name in ("api", "key", "model", "way", "decode", "output_tokens")} == {
        "api": "http",
        "key": "alice",
        "model": "scripted",
        "way": "local",
        "decode": decode.address,
        "output_tokens": 2,
    }
    for phase in ("admit_ms", "tokenize_ms", "route_ms", "ttft_ms"):
        assert 0 <= line[phase] <= 1000 * line["seconds"] + 1, phase
    assert not [secret for secret in SECRETS if secret in str(lines)]
    assert found["baton_http_requests_total", "route=/v1/completions", "status=200"] == 1
    assert found["baton_key_requests_total", "key=alice", "outcome=finished"] == 1
    assert found["baton_key_tokens_total", "key=alice", "kind=output"] == 2
    assert found[("baton_request_seconds_count",)] == 1
    assert found[("baton_request_output_tokens_sum",)] == 2


@pytest.mark.parametrize(
    ("body", "status", "reason", "field"),
    [
        ({**BODY, "temperature": "zyzzyva"}, 400, None, "temperature"),
        ({**BODY, "zyzzyva and more": 1}, 400, None, None),
        ({**BODY, "max_tokens": 0.5}, 400, None, "max_tokens"),
    ],
)
async def test_what_cannot_be_parsed_has_a_line_and_a_count(body, status, reason, field):
    with capture_logs() as lines:
        async with ScriptedDecode(saying([5, 6])) as decode, gateway(decode) as rig:
            assert (await post(rig, None, body)).status_code == status
            found = await scrape(rig)
    (line,) = [line for line in lines if line["event"] == "refused"]
    assert (line["api"], line["status"], line["route"]) == ("http", status, "/v1/completions")
    assert line["reason"] and line.get("field") == field
    assert "hello" not in str(line) and "zyzzyva" not in str(line)
    assert found["baton_gateway_requests_total", "outcome=refused"] == 1
    assert found["baton_http_requests_total", "route=/v1/completions", f"status={status}"] == 1


async def test_unknown_keys_and_paths_are_counted_and_logged_once(tmp_path):
    with capture_logs() as lines:
        async with (
            ScriptedDecode(saying([5, 6])) as decode,
            gateway(
                decode, api_keys=key_file(tmp_path), metrics_token_file=private(tmp_path / "token", TOKEN)
            ) as rig,
        ):
            assert (await post(rig, "wrong-key-of-somebody")).status_code == 401
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.get(f"{rig.http}/nowhere", headers={"Authorization": f"Bearer {ALICE}"})
                assert answer.status_code == 404
                refused = await http.get(f"{rig.http}/metrics", headers={"Authorization": f"Bearer {ALICE}"})
                assert refused.status_code == 401
                refused = await http.get(f"{rig.http}/traces", headers={"Authorization": f"Bearer {TOKEN}"})
                assert refused.status_code == 401, "the token opens /metrics only"
            found = await scrape(rig, TOKEN)
    refused = [
        (line["status"], line["route"], line.get("key")) for line in lines if line["event"] == "refused"
    ]
    assert refused == [
        (401, "other", None),
        (404, "other", "alice"),
        (401, "other", None),
        (401, "other", None),
    ]
    assert "wrong-key" not in str(lines)
    assert found["baton_http_requests_total", "route=other", "status=401"] == 3
    assert not [name for name in found if name[0].endswith("_created")]


async def test_a_message_that_starts_nothing_has_a_line_too():
    with capture_logs() as lines:
        async with ScriptedDecode(saying([5, 6])) as decode, gateway(decode) as rig:
            stream = Stream(rig)
            await stream.call.write(
                inference_pb2.GenerateRequest(cancel=inference_pb2.GenerateCancel(id="zyzzyva"))
            )
            await until(lambda: [line for line in lines if line["event"] == "refused"], 5)
            stream.call.cancel()
    (line,) = [line for line in lines if line["event"] == "refused"]
    assert (line["api"], line["reason"]) == ("grpc", "UNKNOWN_ID") and "zyzzyva" not in str(line)
