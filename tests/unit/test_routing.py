from collections import Counter

from baton.gateway.routing import Candidate, order_prefill, pick_decode

NODES = [Candidate("a", 3), Candidate("b", 1), Candidate("c", 1)]


def test_fewest_requests_and_the_first_of_equals():
    assert pick_decode(NODES) == "b"


def test_session_stays_where_its_pages_are():
    assert pick_decode(NODES, preferred="a") == "a"
    assert pick_decode(NODES, preferred="gone") == "b"


def test_nodes_that_failed_before_are_left_out():
    assert pick_decode(NODES, excluded={"b"}) == "c"
    assert pick_decode(NODES, preferred="a", excluded={"a"}) == "b"
    assert pick_decode(NODES, excluded={"a", "b", "c"}) is None
    assert pick_decode([]) is None


def test_prefill_nodes_take_turns_and_all_are_candidates():
    nodes = ["p", "q", "r"]
    orders = [order_prefill(nodes, turn) for turn in range(30)]
    assert Counter(order[0] for order in orders) == {"p": 10, "q": 10, "r": 10}
    assert all(sorted(order) == nodes for order in orders)
    assert order_prefill(nodes, 0, preferred="r") == ["r", "p", "q"]
    assert order_prefill([], 5) == []
