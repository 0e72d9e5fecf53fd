"""What a gateway logs and counts of each request, also of those that it refuses before they are one."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
import structlog
from gateway_rig import Stream, gateway, until
from prometheus_client.parser import text_string_to_metric_families
from scripted_decode import ScriptedDecode, endless, saying
from structlog.testing import capture_logs
from test_gateway_authentication import ALICE, BOB, BODY, SECRET, bearer, key_file, post, private

from baton.api.page.window import values
from baton.gateway import request_log
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.v1 import inference_pb2

SECRETS = ("hello", "zyzzyva", ALICE, SECRET)
TOKEN = "a-token-for-metrics-only"


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    """A logger keeps the configuration of its first line: what ran here before may have been a command that
    writes warnings only."""
    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.reset_defaults()
    monkeypatch.setattr(request_log, "_log", structlog.get_logger())
    yield
    structlog.reset_defaults()
    if configured:
        structlog.configure(**before)


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
    ("body", "status", "message", "field"),
    [
        ({**BODY, "temperature": "zyzzyva"}, 400, "temperature must be a number", "temperature"),
        ({**BODY, "zyzzyva and more": 1}, 400, "unknown parameter: …", None),
        ({**BODY, "max_tokens": 0.5}, 400, "max_tokens must be an integer", "max_tokens"),
        ({**BODY, "model": "it's zyzzyva"}, 404, "model '…' is not served here; '…' is", "model"),
    ],
)
async def test_what_cannot_be_parsed_has_a_line_and_a_count(body, status, message, field):
    with capture_logs() as lines:
        async with ScriptedDecode(saying([5, 6])) as decode, gateway(decode) as rig:
            assert (await post(rig, None, body)).status_code == status
            found = await scrape(rig)
    (line,) = [line for line in lines if line["event"] == "refused"]
    assert (line["api"], line["status"], line["route"]) == ("http", status, "/v1/completions")
    assert line["reason"] and line.get("field") == field and line["message"] == message
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
            await until(lambda: [line for line in lines if line["event"] == "refused"])
            stream.call.cancel()
    (line,) = [line for line in lines if line["event"] == "refused"]
    assert (line["api"], line["reason"]) == ("grpc", "UNKNOWN_ID") and "zyzzyva" not in str(line)


async def test_calls_over_grpc_that_are_refused_have_a_line_and_a_count_by_reason(tmp_path):
    keys = key_file(tmp_path, f"{ALICE} name=alice streams=1\n{BOB}\n")
    start = inference_pb2.GenerateStart(text="hello", sampling={"max_tokens": 2})
    ask = inference_pb2.CompleteRequest(start=start)
    in_session = inference_pb2.CompleteRequest(start={"text": "hello", "session": "zyzzyva"})
    with capture_logs() as lines:
        async with (
            ScriptedDecode(endless) as decode,
            gateway(decode, api_keys=keys) as rig,
            open_channel(rig.node.address) as channel,
        ):

            async def refused(call) -> str:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call
                return from_rpc_error(error.value).reason

            def raw(method: str):
                return channel.unary_unary(f"/baton.v1.{method}")

            alice, bob = bearer(ALICE), bearer(BOB)
            assert await refused(rig.stub.Complete(ask, metadata=bearer("zyzzyva"))) == "INVALID_API_KEY"
            assert await refused(rig.stub.Complete(ask)) == "MISSING_API_KEY"
            assert await refused(raw("Inference/Complete")(b"zyzzyva", metadata=bob)) == "MALFORMED_MESSAGE"
            assert await refused(raw("Inference/Zyzzyva")(b"", metadata=bob)) == "UNKNOWN_METHOD"
            assert await refused(raw("Node/Drain")(b"", metadata=bob)) == "CLUSTER_SECRET"
            assert await refused(rig.stub.Complete(in_session, metadata=bob)) == "INVALID_FIELD"
            embed = inference_pb2.EmbedRequest(model="zyzzyva")
            assert await refused(rig.stub.Embed(embed, metadata=bob)) == "MODEL_NOT_FOUND"
            held = rig.stub.Generate(metadata=alice)
            await held.write(inference_pb2.GenerateRequest(start={"id": "a", "text": "hello"}))
            await until(lambda: decode.running)
            assert await refused(rig.stub.Complete(ask, metadata=alice)) == "KEY_STREAMS"
            # A request that began has a line of its own, and no second one.
            late = inference_pb2.CompleteRequest(start={"text": "hello", "timeout_ms": 50})
            assert await refused(rig.stub.Complete(late, metadata=bob)) == "DEADLINE_EXCEEDED"
            held.cancel()
            await rig.idle()
            values_by_reason = values(rig.node.gateway.metrics.refusals)
    found = [
        (line["reason"], line.get("field"), line.get("key")) for line in lines if line["event"] == "refused"
    ]
    assert found == [
        ("INVALID_API_KEY", None, None),
        ("MISSING_API_KEY", None, None),
        ("MALFORMED_MESSAGE", "message", "line 2"),
        ("UNKNOWN_METHOD", None, "line 2"),
        ("CLUSTER_SECRET", None, "line 2"),
        ("INVALID_FIELD", "start.session", "line 2"),
        ("MODEL_NOT_FOUND", "model", "line 2"),
        ("KEY_STREAMS", None, "alice"),
    ]
    assert {line["client"] for line in lines if line["event"] == "refused"} == {"127.0.0.1"}
    assert [line["reason"] for line in lines if line["event"] == "failed"] == ["DEADLINE_EXCEEDED"]
    assert values_by_reason == {("grpc", reason): found.count((reason, *rest)) for reason, *rest in found}
    assert "zyzzyva" not in str(lines) and BOB not in str(lines)


async def test_a_client_that_gets_nothing_but_refusals_leaves_few_lines(monkeypatch, caplog):
    monkeypatch.setattr(request_log, "REPEAT_SECONDS", 0.2)
    with capture_logs() as lines:
        async with ScriptedDecode(saying([5, 6])) as decode, gateway(decode) as rig:
            async with httpx.AsyncClient(base_url=rig.http, trust_env=False) as http:
                for _ in range(50):
                    assert (await http.post("/v1/completions", json={"model": 1})).status_code == 400
            reader, writer = await asyncio.open_connection(*rig.node.info().http_address.rsplit(":", 1))
            writer.write(b"zyzzyva\r\n\r\n")
            assert b"400" in await reader.readline()
            writer.close()
            async with httpx.AsyncClient(base_url=rig.http, trust_env=False) as http:
                upgrade = {"connection": "upgrade", "upgrade": "websocket"}
                assert (await http.get("/health", headers=upgrade)).status_code == 200
            found = await scrape(rig)
        assert not caplog.records, "libraries have their own lines"
        seen = [line for line in lines if line["event"] == "refused"]
    of_bodies = [line for line in seen if line["reason"] != "INVALID_HTTP"]
    assert sum(line.get("requests", 1) for line in of_bodies) == 50 and len(of_bodies) < 25
    assert "requests" not in of_bodies[0], "the first has its line at once"
    assert (len(seen) - len(of_bodies), seen[-1]["client"]) == (1, "127.0.0.1")
    assert found["baton_gateway_refusals_total", "api=http", f"reason={of_bodies[0]['reason']}"] == 50
    assert found["baton_gateway_refusals_total", "api=http", "reason=INVALID_HTTP"] == 1
    assert found["baton_gateway_requests_total", "outcome=refused"] == 51
