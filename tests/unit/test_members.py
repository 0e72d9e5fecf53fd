"""The nodes of one role as several sources tell of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.discovery.etcd import apply_events
from baton.discovery.finder import Members, MembershipChange

A, B, C = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"


def test_the_difference_to_what_was_known_is_told():
    members = Members()
    assert members.update("list", [B, A], 0.0) == MembershipChange(joined=(A, B), left=())
    assert not members.update("list", [A, B], 1.0)
    assert members.update("list", [C, A], 2.0) == MembershipChange(joined=(C,), left=(B,))
    assert members.addresses == [A, C]


def test_a_node_stays_while_any_source_names_it():
    members = Members()
    members.update("list", [A], 0.0)
    assert not members.update("etcd", [A], 0.0)
    assert not members.update("etcd", [], 1.0)
    assert members.update("list", [], 1.0) == MembershipChange(joined=(), left=(A,))


def test_an_answer_that_leaves_a_node_out_for_a_moment_takes_nothing():
    members = Members()
    members.update("dns", [A, B], 0.0, hold=10.0)
    assert not members.update("dns", [A], 3.0, hold=10.0)
    assert not members.update("dns", [A, B], 6.0, hold=10.0)
    assert not members.update("dns", [A], 9.0, hold=10.0)
    assert not members.update("dns", [A], 18.9, hold=10.0)
    assert members.update("dns", [A], 19.0, hold=10.0) == MembershipChange(joined=(), left=(B,))


def test_an_incomplete_answer_after_a_silence_takes_nothing_at_once():
    members = Members()
    members.update("dns", [A, B], 0.0, hold=10.0)
    assert not members.update("dns", [A], 60.0, hold=10.0)  # the resolver had been down
    assert not members.update("dns", [A], 69.9, hold=10.0)
    assert members.update("dns", [A], 70.0, hold=10.0) == MembershipChange(joined=(), left=(B,))


def test_a_node_that_says_that_it_leaves_is_not_held():
    members = Members()
    members.update("etcd", [A, B], 0.0, hold=30.0)
    assert members.update("etcd", [A], 1.0, hold=30.0, leaving={B}) == MembershipChange(joined=(), left=(B,))
    assert not members.update("etcd", [A, B], 2.0, hold=30.0).left
    assert not members.update("etcd", [A, B], 3.0, hold=30.0, leaving={B}), "another entry names it"


def test_events_are_applied_in_order():
    nodes = {"k1": A, "k2": B}
    events = [("k1", None), ("k3", C), ("k2", C), ("k9", None), ("k1", B)]
    assert apply_events(nodes, events) == {"k2": C, "k3": C, "k1": B}
    assert nodes == {"k1": A, "k2": B}


names = st.lists(st.sampled_from([A, B, C, "10.0.0.4:1"]))
steps = st.lists(st.tuples(st.sampled_from(["list", "dns", "etcd"]), names))


@given(steps)
def test_changes_add_up_to_what_all_sources_say(history):
    members, known, said = Members(), set(), {}
    for now, (source, nodes) in enumerate(history):
        change = members.update(source, nodes, float(now))
        said[source] = set(nodes)
        assert not known & set(change.joined) and set(change.left) <= known
        known = (known | set(change.joined)) - set(change.left)
        assert known == set().union(*said.values()) == set(members.addresses)
