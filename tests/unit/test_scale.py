"""`baton scale`, and `baton up --ray` where Ray is not installed."""

from __future__ import annotations

import asyncio
import importlib.util

import click
import pytest
from click.testing import CliRunner

from baton.cli import local_secret
from baton.cli.credentials import Credentials
from baton.cli.main import cli
from baton.cli.scale import ScaleServer, _ask, parse_counts
from baton.rpc.errors import BatonError, failed_precondition


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_counts_of_each_role():
    assert parse_counts(("prefill=0", "decode=3")) == {"prefill": 0, "decode": 3}
    for wrong in (("decode",), ("decode=-1",), ("gateway=2",), ("decode=2", "decode=3"), ("decode=",)):
        with pytest.raises(click.UsageError, match="write prefill=N, decode=N"):
            parse_counts(wrong)
    for wrong in ("decode=0", "prefill=65"):
        with pytest.raises(click.UsageError, match="nodes are from"):
            parse_counts((wrong,))


async def test_the_deployment_of_that_gateway_is_asked(capsys):
    asked = []

    async def scale(wanted):
        asked.append(wanted)
        if wanted["decode"] == 9:
            raise failed_precondition("no room")
        return "decode: 1 -> 3"

    server = await ScaleServer.start("127.0.0.1:7001", scale)
    assert await _ask("127.0.0.1:7001", {"decode": 3}, 10.0) == 0
    assert capsys.readouterr().out == "decode: 1 -> 3\n"
    with pytest.raises(SystemExit):
        await _ask("127.0.0.1:7001", {"decode": 9}, 10.0)
    with pytest.raises(SystemExit):
        await _ask("127.0.0.1:7002", {"decode": 3}, 10.0)
    assert asked == [{"decode": 3}, {"decode": 9}]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "baton: no room" and "no 'baton up --ray'" in said[1] and len(said) == 2
    await server.close()
    assert not local_secret.scale_socket("127.0.0.1:7001").exists()
    await asyncio.sleep(0)


@pytest.mark.parametrize("in_clear", [False, True])
def test_a_secret_leaves_this_machine_in_clear_only_if_its_deployment_says_so(in_clear):
    secret = local_secret.LocalSecret("127.0.0.1:7001", in_clear)
    try:
        assert local_secret.find("127.0.0.1:7001") == (secret.text, in_clear)
        assert bool(Credentials.to("127.0.0.1:7001").cluster.metadata("10.0.0.1:1", False)) == in_clear
        with pytest.raises(BatonError, match="a deployment of this user has"):
            local_secret.LocalSecret("127.0.0.1:7001", not in_clear)
    finally:
        secret.close()
    assert local_secret.find("127.0.0.1:7001") == ("", False)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_one_line_says_what_to_install():
    result = CliRunner().invoke(cli, ["up", "--ray", "--port", "0", "--http-port", "0"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("baton: --ray needs Ray") and "pip install 'baton-serve[ray]'" in line
