"""A client that has nothing of Baton but its .proto files, with stubs made by stock grpcio-tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from deployment import Deployment

PROTO = Path(__file__).parents[2] / "proto"
SECONDS = 240.0
CLIENT = r"""
import json, queue, sys

import grpc
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc, tokenizer_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc


def say(**fields):
    print(json.dumps(fields), flush=True)


def chat(*messages):
    said = [tokenizer_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return tokenizer_pb2.ChatPrompt(messages=said)


def short(**fields):
    return common_pb2.SamplingParams(temperature=0, ignore_eos=True, **fields)


class Call:
    def __init__(self, stub):
        self.requests = queue.SimpleQueue()
        self.responses = stub.Generate(iter(self.requests.get, None), timeout=200)

    def start(self, id, **fields):
        start = inference_pb2.GenerateStart(id=id, **fields)
        self.requests.put(inference_pb2.GenerateRequest(start=start))

    def cancel(self, id):
        self.requests.put(inference_pb2.GenerateRequest(cancel=inference_pb2.GenerateCancel(id=id)))

    def answer(self, on_text=None):
        text, ids, kinds = "", [], []
        for response in self.responses:
            kind = response.WhichOneof("kind")
            kinds.append(kind)
            if kind == "delta":
                text += response.delta.text
                ids += response.delta.token_ids
                if on_text:
                    on_text()
            elif kind in ("finished", "failed"):
                return text, ids, kinds, getattr(response, kind)


channel = grpc.insecure_channel(sys.argv[1])
stub = inference_pb2_grpc.InferenceStub(channel)

health = health_pb2_grpc.HealthStub(channel)
for service in ("", "baton.v1.Inference"):
    status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status
    say(health=service, status=health_pb2.HealthCheckResponse.ServingStatus.Name(status))

asked = reflection_pb2.ServerReflectionRequest(list_services="")
reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
listed = next(reflection.ServerReflectionInfo(iter([asked]), timeout=60))
say(services=sorted(service.name for service in listed.list_services_response.service))

models = stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60).models
say(models=[model.name for model in models], chat=models[0].chat)

call = Call(stub)
call.start("complete", text="The list type", sampling=short(max_tokens=12))
text, ids, kinds, finished = call.answer()
say(complete=text, tokens=len(ids), kinds=kinds, usage=finished.usage.output_tokens)

call.start("cancel", text="The list type", sampling=short(max_tokens=2000))
text, ids, kinds, status = call.answer(on_text=lambda: call.cancel("cancel"))
say(cancel=len(ids), code=status.code)

call.start("turn", chat=chat(("user", "What is a list?")), session="s", sampling=short(max_tokens=20))
first, ids, kinds, finished = call.answer()
say(chat=first, prompt=finished.usage.prompt_tokens, cached=finished.usage.cached_tokens)

call.start("next", chat=chat(("user", "And a tuple?")), session="s", sampling=short(max_tokens=20))
second, ids, kinds, finished = call.answer()
say(turn=second, prompt=finished.usage.prompt_tokens, cached=finished.usage.cached_tokens)

# Without a session the whole conversation is sent again, and is the same prompt.
whole = chat(("user", "What is a list?"), ("assistant", first), ("user", "And a tuple?"))
call.start("whole", chat=whole, sampling=short(max_tokens=20))
third, ids, kinds, finished = call.answer()
say(whole=third, prompt=finished.usage.prompt_tokens)

call.requests.put(None)
say(left=len(list(call.responses)))
"""


@pytest.fixture(scope="module")
def said(demo: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """Everything the client printed."""
    folder = tmp_path_factory.mktemp("foreign")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = {"cwd": folder, "timeout": SECONDS, "check": True, "capture_output": True, "text": True}
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    google = Path(find_spec("google.rpc.status_pb2").origin).parents[2]
    tools = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"-I{google}"]
    subprocess.run([*tools, "--python_out=.", "--grpc_python_out=.", *sources], env=clean, **run)
    for package in ("baton", "baton/v1"):
        (folder / package / "__init__.py").touch()
    (folder / "client.py").write_text(CLIENT)
    # Isolated (-I), without the .pth files (-S) that lead to Baton's sources; the stubs come first.
    paths = [str(folder), *(path for path in sys.path if path.endswith("site-packages"))]
    boot = (
        "import sys, runpy; "
        "sys.path[:] = [path for path in sys.path if 'site-packages' not in path]; "
        f"sys.path[:0] = {paths!r}; "
        "runpy.run_path('client.py', run_name='__main__'); "
        f"import baton; assert list(baton.__path__) == [{str(folder / 'baton')!r}], baton.__path__"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", boot, demo.gateway.address], env=clean, **run)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    yield {next(iter(line)): line for line in lines} | {
        "health": [line for line in lines if "health" in line]
    }


def test_health(said: dict):
    assert [line["status"] for line in said["health"]] == ["SERVING", "SERVING"]


def test_reflection_lists_every_service(said: dict):
    expected = {"baton.v1.Inference", "baton.v1.Node", "grpc.health.v1.Health"}
    assert expected < set(said["services"]["services"])


def test_models(said: dict):
    assert said["models"] == {"models": ["demo"], "chat": True}


def test_completes(said: dict):
    line = said["complete"]
    assert line["complete"].strip() and line["tokens"] == line["usage"] == 12
    assert line["kinds"][0] == "accepted" and line["kinds"][-1] == "finished"


def test_cancels(said: dict):
    line = said["cancel"]
    assert 1 <= line["cancel"] < 2000 and line["code"] == 1


def test_chats_for_two_turns(said: dict):
    first, second, whole = said["chat"], said["turn"], said["whole"]
    assert first["chat"].strip() and second["turn"].strip()
    assert second["prompt"] > first["prompt"] + 20
    assert second["cached"] >= first["prompt"], "the second turn has used the first one's pages"
    assert whole["whole"] == second["turn"], "a session's turn is what the whole conversation would give"


def test_half_closing_ends_the_stream(said: dict):
    assert said["left"] == {"left": 0}
