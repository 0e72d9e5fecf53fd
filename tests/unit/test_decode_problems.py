"""What a decode node says is wrong, and whether requests are served all the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from baton.config import DecodeConfig
from baton.v1 import node_pb2
from baton.worker.decode.server import DecodeNode


def core(overdue, broken=""):
    fetches = SimpleNamespace(pulls=SimpleNamespace(overdue=overdue))
    return SimpleNamespace(fetches=fetches, scheduler=SimpleNamespace(drafts=SimpleNamespace(broken=broken)))


@pytest.mark.parametrize(
    ("usable", "stops"), [({"a:1"}, True), (set(), True), ({"a:1", "b:1"}, False), ({"b:1"}, False)]
)
def test_an_overdue_pull_stops_serving_only_where_no_other_prefill_node_is_left(monkeypatch, usable, stops):
    node = DecodeNode(DecodeConfig())
    node.core_or_none = core(overdue=["a:1"])
    monkeypatch.setattr(node, "stuck", lambda: False)
    monkeypatch.setattr(node, "steps", SimpleNamespace(broken=""), raising=False)
    monkeypatch.setattr(node, "peers", SimpleNamespace(usable=usable, lost=list))
    (problem,) = node.problems(node_pb2.Load())
    assert (problem.reason, problem.stops_serving) == ("PULL_STUCK", stops)
    assert "a:1" in problem.message


def test_nothing_is_wrong_where_no_pull_is_overdue(monkeypatch):
    node = DecodeNode(DecodeConfig())
    node.core_or_none = core(overdue=[])
    monkeypatch.setattr(node, "stuck", lambda: False)
    monkeypatch.setattr(node, "steps", SimpleNamespace(broken=""), raising=False)
    assert list(node.problems(node_pb2.Load())) == []


def test_a_drafter_that_has_failed_is_a_problem_that_serves(monkeypatch):
    node = DecodeNode(DecodeConfig())
    node.core_or_none = core([], "the drafter failed")
    monkeypatch.setattr(node, "stuck", lambda: False)
    monkeypatch.setattr(node, "steps", SimpleNamespace(broken=""), raising=False)
    (problem,) = node.problems(node_pb2.Load())
    assert (problem.reason, problem.stops_serving) == ("DRAFTER_FAILED", False)
