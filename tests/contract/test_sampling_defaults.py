"""What the checkpoint's generation_config.json recommends holds where a request says nothing."""

import json
import shutil
from contextlib import asynccontextmanager

import httpx
import pytest
from gateway_rig import Stream, gateway, tokenizer
from scripted_decode import ScriptedDecode, saying
from structlog.testing import capture_logs

from baton.demo import model_path
from baton.model_path import CheckpointError
from baton.tokenizer import hf_tokenizer
from baton.v1 import common_pb2

RECOMMENDED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": None}


def checkpoint(folder, **generation):
    """The demo model's tokenizer, with another generation_config.json."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@asynccontextmanager
async def served(folder, **config):
    async with (
        tokenizer(model=str(checkpoint(folder, **RECOMMENDED))) as address,
        ScriptedDecode(saying([40])) as node,
        gateway(node, tokenizer_address=address, **config) as rig,
        httpx.AsyncClient(base_url=rig.http) as http,
    ):
        yield rig, node, http


async def test_they_hold_over_grpc_and_http(tmp_path):
    async with served(tmp_path) as (rig, node, http):
        stream = Stream(rig)
        await stream.start(text="x")
        await stream.until_end()
        await stream.start("b", text="x", sampling=common_pb2.SamplingParams(temperature=0))
        await stream.until_end("b")
        for value in 0, -1:
            body = {"model": "scripted", "prompt": "x", "top_k": value}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        sent = [start.sampling for start in node.starts]
        assert [round(each.temperature, 6) for each in sent] == [0.6, 0, 0.6, 0.6]
        assert [each.top_k for each in sent] == [20, 20, 0, 0]
        assert not sent[0].HasField("min_p") and not sent[0].HasField("repetition_penalty")
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["default_sampling"] == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


async def test_unless_the_gateway_is_told_otherwise(tmp_path):
    async with served(tmp_path, generation_config="none") as (rig, node, http):
        stream = Stream(rig)
        await stream.start(text="x")
        await stream.until_end()
        assert not node.starts[0].sampling.HasField("temperature")
        assert (await http.get("/v1/models")).json()["data"][0]["default_sampling"] == {}


@pytest.mark.parametrize(
    ("generation", "temperature"),
    [({"temperature": 0.5}, 0.5), ({"do_sample": False, "temperature": 0.5}, 0.0), ({}, 0.0)],
)
def test_greedy_checkpoints_recommend_nothing(tmp_path, generation, temperature):
    assert hf_tokenizer.load(checkpoint(tmp_path, **generation)).default_sampling.temperature == temperature


def test_greedy_checkpoints_may_recommend_a_penalty(tmp_path):
    recommended = hf_tokenizer.load(
        checkpoint(tmp_path, do_sample=False, repetition_penalty=1.5)
    ).default_sampling
    assert recommended == common_pb2.SamplingParams(repetition_penalty=1.5)


def test_fields_that_are_not_applied_are_named(tmp_path):
    fields = {"num_beams": 1, "min_length": 0, "suppress_tokens": [7], "forced_eos_token_id": 2}
    with capture_logs() as logs:
        hf_tokenizer.load(checkpoint(tmp_path, **fields))
    assert [log["fields"] for log in logs] == ["suppress_tokens, forced_eos_token_id"]


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "high"}, {"top_k": 1.5}])
def test_values_out_of_range_are_refused(tmp_path, wrong):
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        hf_tokenizer.load(checkpoint(tmp_path, **wrong))
