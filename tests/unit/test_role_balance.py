"""When a worker should change its role: by queues that last, within bounds, and never back and forth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from baton.gateway.role_balance import MOST_PAUSES, RoleBalance, RoleBounds, RoleLoad, measure

BOUNDS = RoleBounds(lasting=10, pause=60)


def prefill(number, tokens=0, rate=1000.0, **more):
    return RoleLoad(f"h:5{number}", "prefill", tokens, rate, **more)


def decode(number, wait=0.0, running=4, rows=4, **more):
    return RoleLoad(f"h:7{number}", "decode", 0, 1000.0, wait, running, rows, **more)


class Clock:
    """Looks once a second, and makes the changes that are wanted."""

    def __init__(self, bounds=BOUNDS, **roles):
        self.balance, self.now, self.changes = RoleBalance(bounds), 100.0, []
        self.roles = {f"h:{n}": role for n, role in enumerate(r for r, c in roles.items() for _ in range(c))}

    def nodes(self, prompts, rows):
        """prompts, rows: seconds that each waits, however many nodes there are."""
        rate = 1000.0
        return [
            RoleLoad(a, role, int(prompts * rate), rate)
            if role == "prefill"
            else RoleLoad(a, role, 0, rate, rows, 4, 4)
            for a, role in self.roles.items()
        ]

    def run(self, seconds, prompts=0.0, rows=0.0, works=True, refuse=()):
        found = []
        for _ in range(seconds):
            self.now += 1
            change = self.balance.look(self.now, self.nodes(prompts, rows))
            if change is not None:
                found.append(change)
                self.changes.append((self.now, change.to))
                if change.address in refuse:
                    self.balance.failed(self.now, change.address)
                elif works:
                    self.roles[change.address] = change.to
        return found

    def count(self, role):
        return list(self.roles.values()).count(role)


@pytest.mark.parametrize(("queues", "role"), [((3, 0), "prefill"), ((0, 3), "decode")])
def test_a_queue_that_lasts_gets_a_node_of_the_other_role(queues, role):
    clock = Clock(prefill=2, decode=2)
    assert not clock.run(10, *queues)
    (change,) = clock.run(1, *queues)
    assert change.to == role and clock.count(role) == 3
    prompts, rows = queues
    assert change.why == f"prompts wait {prompts:.1f} s and requests for a row {rows:.1f} s, for 10 s"


def test_a_queue_that_ends_in_time_changes_nothing():
    clock = Clock(prefill=2, decode=2)
    for _ in range(20):
        assert not clock.run(9, prompts=30) and not clock.run(1)


def test_where_both_wait_nothing_changes():
    clock = Clock(prefill=2, decode=2)
    assert not clock.run(300, prompts=5, rows=5)
    assert not clock.run(300, prompts=5, rows=BOUNDS.calm + 0.01)
    assert not clock.run(300, prompts=BOUNDS.busy - 0.1)


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_least_number_of_each_stays(role, least):
    clock = Clock(RoleBounds(least_prefill=least, least_decode=least, pause=5), prefill=4, decode=4)
    queues = {"prompts": 9.0} if role == "decode" else {"rows": 9.0}
    assert len(clock.run(600, **queues)) == 4 - least
    assert clock.count(role) == least


def test_between_two_changes_there_is_a_pause():
    clock = Clock(prefill=1, decode=5)
    clock.run(400, prompts=9)
    times = [at for at, _ in clock.changes]
    assert len(times) == 4 and all(b - a >= 60 for a, b in itertools.pairwise(times))


def test_a_change_that_fails_is_tried_again_after_the_pause():
    clock = Clock(prefill=1, decode=3)
    assert len(clock.run(130, prompts=9, works=False)) == 2


def test_a_node_that_refuses_is_left_alone_for_others():
    clock = Clock(prefill=1, decode=4)
    changes = clock.run(250, prompts=9, refuse={"h:4"})
    assert [change.address for change in changes] == ["h:4", "h:3", "h:4", "h:2"]


def test_a_node_that_always_refuses_is_asked_ever_more_seldom():
    clock, both = Clock(prefill=1, decode=2), {"h:1", "h:2"}
    asked = [s for s in range(7200) for c in clock.run(1, prompts=9, refuse=both) if c.address == "h:2"]
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert gaps[:3] == [120, 240, 480] and set(gaps[3:]) == {MOST_PAUSES * 60}


def test_a_node_that_has_changed_its_role_has_refused_nothing():
    clock = Clock(prefill=1, decode=3)
    clock.run(1)
    for _ in range(3):
        clock.balance.failed(clock.now, "h:3")
    clock.roles["h:3"] = "prefill"
    clock.run(1)
    clock.roles["h:3"] = "decode"
    (change,) = clock.run(130, prompts=9)
    assert change.address == "h:3"


def test_a_role_without_enough_nodes_asks_one_that_refused_again():
    clock = Clock(prefill=0, decode=2)
    assert len(clock.run(60, refuse={"h:0", "h:1"})) >= 4


@pytest.mark.parametrize("period", [4, 8, 15, 30, 60, 90, 200])
def test_a_load_that_alternates_does_not_make_roles_alternate_with_it(period):
    """Shorter than what must last: nothing changes. Else the pause between changes grows."""
    clock = Clock(prefill=2, decode=2)
    for _ in range(7200 // (2 * period)):
        clock.run(period, prompts=9)
        clock.run(period, rows=9)
    if period <= BOUNDS.lasting:
        assert not clock.changes
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(clock.changes)]
    assert all(gap >= BOUNDS.pause for gap in gaps)
    assert len(clock.changes) <= 14, "in two hours"


def test_a_node_too_few_on_both_sides_does_not_wander():
    """One node more on either side ends the queue there and begins one on the other."""
    clock = Clock(prefill=2, decode=1)
    for _ in range(14400):
        many = clock.count("prefill") == 2
        clock.run(1, prompts=0.0 if many else 5.0, rows=5.0 if many else 0.0)
    assert len(clock.changes) <= 20, "in four hours"
    last = [at for at, _ in clock.changes][-3:]
    assert last[1] - last[0] >= MOST_PAUSES * BOUNDS.pause


def test_a_load_that_turns_seldom_is_followed_each_time():
    clock = Clock(prefill=2, decode=2)
    for number in range(6):
        changes = clock.run(1800, **({"rows": 9.0} if number % 2 else {"prompts": 9.0}))
        assert {change.to for change in changes} == {"decode" if number % 2 else "prefill"}


def test_a_role_without_enough_nodes_gets_one_without_a_queue_or_a_pause():
    """A node whose role had changed died, and is again what it was started as."""
    clock = Clock(prefill=1, decode=2)
    clock.run(11, prompts=9)
    assert clock.count("decode") == 1
    clock.roles = dict.fromkeys(clock.roles, "prefill")
    assert not clock.run(10) and not [role for role in clock.roles.values() if role == "decode"]
    (change,) = clock.run(2)
    assert change.to == "decode" and change.why == "fewer than 1 decode nodes serve, for 10 s"
    assert not clock.run(600)


def test_the_last_node_is_not_taken_to_replace_another():
    clock = Clock(prefill=1)
    assert not clock.run(300)


def test_a_change_by_others_counts_for_the_pause():
    clock = Clock(prefill=1, decode=3)
    clock.run(1)
    clock.roles["h:1"] = "prefill"
    assert not clock.run(60, prompts=9)
    assert len(clock.run(5, prompts=9)) == 1


def test_two_who_decide_at_once_choose_the_same_node():
    nodes = [prefill(0, 9000), decode(2), decode(1), decode(3)]
    first, second = RoleBalance(BOUNDS), RoleBalance(BOUNDS)
    for now in range(11):
        one, other = first.look(now, nodes), second.look(now + 0.4, list(reversed(nodes)))
    assert one == other is not None and one.address == "h:73"


def test_what_was_not_looked_at_has_not_lasted():
    balance, nodes = RoleBalance(BOUNDS), [prefill(0, 9000), decode(1), decode(2)]
    assert balance.look(0, nodes) is None
    assert balance.look(30, nodes) is None
    assert balance.look(32, nodes) is None


def test_who_may_change():
    balance, bounds = RoleBalance(BOUNDS), replace(BOUNDS, lasting=0)
    full = [prefill(0, 9000), *(decode(n, context_tokens=600, pool_tokens=1000) for n in (1, 2))]
    assert RoleBalance(bounds).look(0, full) is None, "the other one has no room for what both hold"
    room = [*full, decode(0, pool_tokens=1000)]
    change = RoleBalance(bounds).look(0, room)
    assert change is not None and change.address == "h:72"
    small = [prefill(0), prefill(1, able=False), decode(1, wait=5.0)]
    change = RoleBalance(bounds).look(0, small)
    assert change is not None and change.address == "h:50"
    assert RoleBalance(bounds).look(0, [replace(each, able=False) for each in small]) is None
    assert balance.look(0, []) is None


def test_how_queues_are_measured():
    nodes = [prefill(0, 2000), prefill(1, 0), decode(1, wait=4.0, running=1), decode(2)]
    queues = measure(nodes)
    assert queues.prompts == 1.0, "both compute them"
    assert queues.rows == 0.5, "three of four rows wait for prompts, and nobody waits at the other node"
    local = [prefill(0), replace(decode(1), queued_tokens=3000)]
    assert measure(local).prompts == 3.0, "what decode nodes compute themselves could be computed elsewhere"
    assert measure([prefill(0, 1000, rate=0.0)]).prompts == 0.5, "a rate is assumed"
