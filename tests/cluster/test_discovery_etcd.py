"""Finding nodes in a real etcd: leases, watches, losses."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import grpc
import pytest
from etcd import running_etcd
from polling import until

import certificates
from baton.config import NodeConfig
from baton.discovery.etcd import LEASE_SECONDS, Etcd, Registration, seen_from
from baton.discovery.finder import Finder
from baton.etcd import rpc_pb2, rpc_pb2_grpc
from baton.rpc.errors import BatonError

PREFIX = "/baton"
HOLD_SECONDS = 2.0


@pytest.fixture
def etcd(tmp_path):
    with running_etcd(tmp_path) as running:
        yield running


@asynccontextmanager
async def finding(etcd, changes=None, prefix=PREFIX):
    access = etcd if isinstance(etcd, Etcd) else Etcd((etcd.endpoint,), prefix)
    finder = Finder("decode", [], access, (changes if changes is not None else []).append)
    finder.start()
    try:
        yield finder
    finally:
        await finder.close()


def register(etcd, number, address, role="decode", prefix=PREFIX):
    access = etcd if isinstance(etcd, Etcd) else Etcd((etcd.endpoint,), prefix)
    registration = Registration(access, role, number, address)
    registration.start()
    return registration


async def test_nodes_join_and_leave(etcd):
    changes = []
    first = register(etcd, 1, "10.0.0.1:50071")
    async with finding(etcd, changes) as finder:
        await until(lambda: finder.addresses == ["10.0.0.1:50071"], "the first node is found")
        second = register(etcd, 2, "10.0.0.2:50071")
        other_role = register(etcd, 3, "10.0.0.3:50061", role="prefill")
        other_deployment = register(etcd, 4, "10.0.0.4:50071", prefix="/baton2")
        await until(lambda: len(finder.addresses) == 2, "the second node is found")
        await first.close()
        await until(lambda: finder.addresses == ["10.0.0.2:50071"], "the first has left", LEASE_SECONDS)
        for each in (second, other_role, other_deployment):
            await each.close()
        await until(lambda: not finder.addresses, "all have left", LEASE_SECONDS)
    joined = [address for change in changes for address in change.joined]
    left = [address for change in changes for address in change.left]
    assert joined == left == ["10.0.0.1:50071", "10.0.0.2:50071"]


async def test_a_node_that_died_without_a_word_goes_some_time_after_its_lease(etcd, monkeypatch):
    monkeypatch.setattr("baton.discovery.etcd.HOLD_SECONDS", HOLD_SECONDS)
    dead = register(etcd, 1, "10.0.0.1:50071")
    alive = register(etcd, 2, "10.0.0.2:50071")
    async with finding(etcd) as finder:
        await until(lambda: len(finder.addresses) == 2, "both are found")
        await dead._tasks.close()  # what a killed process does: nothing more
        took = await until(
            lambda: finder.addresses == ["10.0.0.2:50071"],
            "it is held no longer",
            LEASE_SECONDS + HOLD_SECONDS + 10.0,
        )
        assert took > LEASE_SECONDS / 3 + HOLD_SECONDS, "left before its lease could have expired"
    await alive.close()


async def test_a_loss_of_etcd_takes_no_node_and_is_made_good(etcd):
    node = register(etcd, 1, "10.0.0.1:50071")
    changes = []
    async with finding(etcd, changes) as finder:
        await until(lambda: finder.addresses == ["10.0.0.1:50071"], "found")
        etcd.stop()
        await asyncio.sleep(2.0)
        assert finder.addresses == ["10.0.0.1:50071"]
        etcd.start()
        late = register(etcd, 2, "10.0.0.2:50071")
        await until(lambda: len(finder.addresses) == 2, "found after the loss")
        await asyncio.sleep(LEASE_SECONDS / 3 + 1.0)
        assert len(finder.addresses) == 2 and all(not change.left for change in changes)
        await node.close()
        await late.close()


async def test_a_lease_that_was_taken_away_is_made_again_and_the_node_is_held_meanwhile(etcd):
    node = register(etcd, 1, "10.0.0.1:50071")
    changes = []
    async with finding(etcd, changes) as finder:
        await until(lambda: finder.addresses, "found")
        async with grpc.aio.insecure_channel(etcd.endpoint) as channel:
            revoke = rpc_pb2.LeaseRevokeRequest(ID=node._lease[1])
            await rpc_pb2_grpc.LeaseStub(channel).LeaseRevoke(revoke, timeout=5)
        await until(lambda: not finder._in_etcd, "gone from etcd")
        await until(lambda: finder._in_etcd, "registered again")
        assert [change for change in changes if change.left] == []
        await node.close()
        await until(lambda: not finder.addresses, "it said that it left", LEASE_SECONDS)


async def enable_authentication(etcd, credentials):
    """With one user, root. The requests of these calls have the fields of AuthenticateRequest."""
    async with grpc.aio.secure_channel(etcd.endpoint, credentials) as channel:
        for call, first, second in (
            ("UserAdd", "root", "secret"),
            ("RoleAdd", "root", ""),
            ("UserGrantRole", "root", "root"),
            ("AuthEnable", "", ""),
        ):
            request = rpc_pb2.AuthenticateRequest(name=first, password=second)
            method = channel.unary_unary(
                f"/etcdserverpb.Auth/{call}",
                request_serializer=rpc_pb2.AuthenticateRequest.SerializeToString,
                response_deserializer=rpc_pb2.AuthenticateResponse.FromString,
            )
            await method(request, timeout=5)


async def test_tls_and_a_user(tmp_path):
    pem = certificates.make(tmp_path / "pem")
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o600)
    (tmp_path / "etcd").mkdir()
    with running_etcd(tmp_path / "etcd", pem) as server:
        tls = {"etcd": (server.endpoint,), "etcd_ca": pem.ca, "etcd_cert": pem.cert, "etcd_key": pem.key}
        user = {"etcd_user": "root", "etcd_password_file": str(password)}
        access = Etcd.load(NodeConfig(**tls, **user))
        await enable_authentication(server, access.credentials)
        async with finding(access) as finder:
            node = register(access, 1, "10.0.0.1:50071")
            await until(lambda: finder.addresses == ["10.0.0.1:50071"], "the node is found")
            no_user, no_tls = Etcd.load(NodeConfig(**tls)), Etcd((server.endpoint,), PREFIX)
            for each in (no_user, no_tls, dataclasses.replace(access, password="wrong")):
                stranger = register(each, 2, "10.0.0.2:50071")
                with pytest.raises(BatonError):
                    async with each.connect(server.endpoint) as channel:
                        await stranger._hold(channel, server.endpoint)
                await stranger.close()
            await node.close()
            await until(lambda: not finder.addresses, "it has left", LEASE_SECONDS)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"etcd_user": "a"}, "--etcd-password-file"),
        ({"etcd_cert": "a"}, "--etcd-key"),
        ({"etcd_cert": "a", "etcd_key": "b"}, "--etcd-ca"),
        ({"etcd_ca": "/nowhere"}, "--etcd-ca: cannot read /nowhere"),
        ({"etcd_user": "a", "etcd_password_file": "b"}, "in clear"),
    ],
)
def test_flags_that_do_not_go_together(flags, words):
    with pytest.raises(BatonError, match=words):
        Etcd.load(NodeConfig(etcd=("etcd.example:2379",), **flags))


def test_an_address_of_all_interfaces_is_registered_as_etcd_would_see_it():
    assert seen_from("10.0.0.1:50071", "127.0.0.1:2379") == "10.0.0.1:50071"
    assert seen_from("0.0.0.0:50071", "127.0.0.1:2379") == "127.0.0.1:50071"
    with pytest.raises(BatonError, match="--advertise"):
        seen_from("0.0.0.0:50071", "nowhere.invalid:2379")
