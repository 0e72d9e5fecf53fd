"""Bad bytes to every port: nothing crashes, hangs or leaks, and a good request is answered as before. And
strangers at every door of a closed deployment: they get nothing, and change nothing.

The corpus in tests/fuzz_corpus is sent whole, that of strangers in every way; then fresh messages. A case
that fails is written to the test's folder; put it into the corpus. benchmarks/fuzz.py does this for longer.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from random import Random

import grpc
import pytest
from fuzzing import Keys, Run, load, save, strangers, structured
from fuzzing.cases import CHANGES, FOR_STRANGERS, HEALTH, METHODS
from fuzzing.credentials import WAYS, broken
from fuzzing.h2 import call_bare, request
from fuzzing.mutate import mutated
from fuzzing.strangers import every_door
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.authentication.cluster import HEADER

TESTS = Path(__file__).parent.parent
CORPUS = TESTS / "fuzz_corpus"
PROTO = TESTS.parent / "proto"
CALLS = 130
"""Of each kind; of one to a dozen messages each, by chance."""
STRANGERS = 150


@pytest.fixture(scope="module")
def fuzzed(qwen3, tmp_path_factory, deployments) -> Iterator[Run]:
    with Run.open(tmp_path_factory.mktemp("fuzz"), qwen3[0]) as deployment:
        deployments.append(deployment)
        yield Run(deployment)


@pytest.fixture(scope="module")
def closed(qwen3, tmp_path_factory, deployments) -> Iterator[Run]:
    keys = Keys(secrets.token_hex(32), secrets.token_hex(16))
    with Run.closed(tmp_path_factory.mktemp("closed"), qwen3[0], keys) as deployment:
        deployments.append(deployment)
        yield Run(deployment, keys)


def clean(run: Run, folder: Path) -> None:
    for number, case in enumerate(run.report.failing):
        print("kept:", save(case, folder, f"failing-{number}"))
    wrong, run.report.wrong, run.report.failing = run.report.wrong, [], []
    assert not wrong, "\n".join(wrong)


def test_corpus(fuzzed: Run, tmp_path: Path):
    cases = load(CORPUS)
    assert len(cases) > 20
    for leaving in (0.0, 1.0):
        fuzzed.send(cases, Random(1), leaving=leaving)
    clean(fuzzed, tmp_path)


def test_fresh_messages(fuzzed: Run, tmp_path: Path):
    seed = int(os.environ.get("BATON_FUZZ_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_FUZZ_SEED={seed}")
    rng = Random(seed)
    before = fuzzed.report.calls
    fuzzed.send(structured(CALLS, seed), rng)
    fuzzed.send(itertools.islice(mutated(rng), CALLS), rng)
    clean(fuzzed, tmp_path)
    assert fuzzed.report.calls - before > 1.8 * CALLS  # those that lack a message are not sent


def test_strangers(closed: Run, tmp_path: Path):
    seed = int(os.environ.get("BATON_FUZZ_SEED", "0")) or secrets.randbits(32)
    print(f"BATON_FUZZ_SEED={seed}")
    closed.send([*load(CORPUS / "strangers"), *every_door()], Random(1), leaving=0.0)
    closed.send(itertools.islice(strangers(Random(seed)), STRANGERS), Random(seed))
    clean(closed, tmp_path)
    assert set(closed.report.by_way) == set(WAYS)


def test_friends_come_in_on_bare_connections_too(closed: Run):
    """Else that nothing is delivered to strangers there would tell nothing of doors."""
    keys = closed.keys
    assert keys is not None
    for process in closed.deployment.processes:
        right = keys.of(True)
        sent = request("/baton.v1.Node/GetInfo", [b""], ((right.name, right.full),))
        delivered = asyncio.run(call_bare(process.address, sent))
        assert process.role.encode() in delivered


ELSEWHERE = ("Pictures/Fetch", "Encode/Run", "Encode/Lend")
"""Of processes and ports that this deployment has not: tests/contract sends them what is wrong
(test_seen_images.py, test_encode_nodes.py)."""


def test_every_method_of_the_contract_is_fuzzed():
    known = {method.path: method for method in METHODS}
    found = set()
    for file in sorted((PROTO / "baton" / "v1").glob("*.proto")):
        module = importlib.import_module(f"baton.v1.{file.stem}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            for described in service.methods:
                path = f"{service.name}/{described.name}"
                found.add(path)
                if method := known.get(path):
                    assert method.request is GetMessageClass(described.input_type), path
                    assert method.stream is described.client_streaming, path
    assert found == {*known, *ELSEWHERE, *(each.path for each in CHANGES)}


def test_every_service_of_every_process_is_fuzzed(fuzzed: Run):
    known = {
        (role, method.wire[1:].partition("/")[0])
        for method in (*FOR_STRANGERS, *HEALTH)
        for role in method.roles
    }
    # Of the role that a worker may be given: until then all calls are refused.
    known |= {("prefill", "baton.v1.Decode"), ("decode", "baton.v1.Prefill")}
    listing = reflection_pb2.ServerReflectionRequest(list_services="")
    served = set()
    for process in fuzzed.deployment.processes:
        with grpc.insecure_channel(process.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (answer,) = stub.ServerReflectionInfo(iter([listing]), timeout=10)
        served |= {(process.role, service.name) for service in answer.list_services_response.service}
    assert known == served


def test_what_strangers_show_opens_nothing_by_chance():
    """In no way is it what opens the door, once and alone; and the judge of strangers knows what does."""
    keys = Keys(secrets.token_hex(32), secrets.token_hex(16))
    for right in (keys.of(True), keys.of(False), keys.of(True, http=True)):
        for way in WAYS:
            assert broken(way, right) != ((right.name, right.full),), way
    assert keys.of(True).full == keys.secret and keys.of(True).name == HEADER
    assert keys.of(False).full == f"Bearer {keys.api_key}"
