"""The simulator: the first seeds of the core as it is, replay, shrinking, and its own parts."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from planted import BUGS, planted
from shrink import shrink

from baton.gateway.node_load import NodeLoad
from baton.gateway.routing import Router
from baton.sim.audit import EVERY_SECONDS, TOLERATED_SECONDS
from baton.sim.cluster import SimCluster
from baton.sim.faults import FAULTS, Fault
from baton.sim.model import SimPool, reference
from baton.sim.network import Network
from baton.sim.run import run_many, run_scenario, run_seed
from baton.sim.scenario import CALM_SECONDS, make_scenario
from baton.sim.scenario_roles import make_auto_scenario, make_role_scenario
from baton.sim.scenario_tiers import REPEATED
from baton.sim.transport import LATEST_FIRST_LOOK_SECONDS
from baton.sim.world import Actor, Violation, World


@pytest.mark.parametrize("seed", [2083])
def test_seeds_that_have_failed(seed):
    assert not run_seed(seed).failure


@pytest.mark.timeout(600)
def test_no_seed_breaks_a_rule():
    seeds = range(240)
    outcomes = list(run_many(seeds))
    failed = [str(outcome) for outcome in outcomes if outcome.failure]
    assert not failed, "\n".join([f"{len(failed)} seeds failed", *failed[:5]])
    assert sorted(outcome.seed for outcome in outcomes) == list(seeds)
    # A simulator in which nothing happens finds nothing: most requests finish, and each kind of end occurs.
    ends = {end: sum(outcome.requests.get(end, 0) for outcome in outcomes) for end in _ends(outcomes)}
    assert ends["finished"] > 0.5 * sum(ends.values())
    assert all(ends[end] for end in ("CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL")), ends
    assert "open" not in ends
    assert sum(outcome.resumed for outcome in outcomes) > 0.1 * len(seeds), (
        "streams went on at another decode node"
    )
    assert sum(outcome.pulled_pages for outcome in outcomes) > 20 * len(seeds)
    repeated = [outcome for outcome in outcomes if _repeats(make_scenario(outcome.seed))]
    assert len(repeated) > 0.1 * len(seeds)
    assert sum(outcome.disk_pages > 0 for outcome in repeated) > 0.7 * len(repeated)


def test_changes_of_role_break_no_rule_among_other_faults():
    outcomes = [run_scenario(make_role_scenario(seed)) for seed in range(12)]
    assert not [str(outcome) for outcome in outcomes if outcome.failure]
    assert sum(outcome.role_changes for outcome in outcomes) >= 12
    kinds = {fault.kind for seed in range(12) for fault in make_role_scenario(seed).faults}
    assert {"role", "crash", "cut", "stall"} <= kinds


def test_gateways_that_change_roles_break_no_rule():
    outcomes = [run_scenario(make_auto_scenario(seed)) for seed in range(24)]
    assert not [str(outcome) for outcome in outcomes if outcome.failure]
    assert sum(outcome.role_changes for outcome in outcomes) >= 6


@pytest.mark.thorough
def test_figures_that_are_wrong_break_no_rule(monkeypatch):
    """What a gateway believes of nodes and caches costs time at worst."""
    rng = random.Random(7)

    def lie(router, address, prompt, preferred):
        numbers = [rng.choice((0, 1, 10**6)) for _ in range(6)]
        return NodeLoad(
            address, *numbers, *(rng.choice((0.0, 1e6)) for _ in range(2)), known=rng.random() < 0.5
        )

    monkeypatch.setattr(Router, "load_of", lie)
    outcomes = [run_seed(seed) for seed in range(40)]
    assert not [str(outcome) for outcome in outcomes if outcome.failure]
    assert sum(outcome.requests.get("finished", 0) for outcome in outcomes) > 200


def test_no_innocent_request_fails_by_300_random_kills():
    """A request without a token is suspected when its node is lost, and counts as the cause when that happens
    to it again and again; not by chance, with a kill in each second. (Four within half a second can.)"""
    resumed = 0
    for seed in range(30):
        scenario, rng = make_scenario(seed), random.Random(seed)
        names = [f"p{i}" for i in range(len(scenario.prefill))]
        names += 3 * [f"d{i}" for i in range(len(scenario.decode))]
        faults = [
            Fault(second + rng.random(), "crash", rng.choice(names), seconds=rng.uniform(0.0, 0.2))
            for second in range(1, 11)
        ]
        requests = [
            replace(
                spec, params=replace(spec.params, seed=spec.params.seed % 2**63), at=rng.uniform(1.0, 11.0)
            )
            for spec in scenario.requests
            if not spec.probe
        ]
        gateway = replace(scenario.gateway, max_resumes=8, wait=30.0)
        outcome = run_scenario(
            replace(scenario, requests=tuple(requests), faults=tuple(faults), gateway=gateway)
        )
        assert not outcome.failure, outcome
        assert "INTERNAL" not in outcome.requests
        resumed += outcome.resumed
    assert resumed > 30, resumed


def _repeats(scenario):
    return any(machine.disk == REPEATED for _, machine in (*scenario.prefill, *scenario.decode))


def _ends(outcomes):
    return {end for outcome in outcomes for end in outcome.requests}


def test_every_kind_of_fault_is_drawn():
    faults = [fault for seed in range(200) for fault in make_scenario(seed).faults]
    assert {fault.kind for fault in faults} == {*FAULTS, "hang", "babble", "lie", "kill-rank", "stall-rank"}


def test_the_audit_waits_for_the_latest_first_look_of_a_pull():
    assert TOLERATED_SECONDS >= LATEST_FIRST_LOOK_SECONDS + EVERY_SECONDS


def test_hangs_that_overlap_end_before_the_calm():
    """What is asked once all faults are over has to finish, so that they must be over."""
    scenario = make_scenario(5)
    cluster = SimCluster(replace(scenario, faults=()))
    worker = cluster.processes["d0"]
    faults = [Fault(1.0, "hang", "d0", seconds=20.0), Fault(2.0, "hang", "d0", seconds=20.0)]
    for fault in faults:
        cluster.world.now = fault.at
        worker.hang(fault.seconds)
    assert worker.hangs_until <= replace(scenario, faults=tuple(faults)).calm - CALM_SECONDS


@pytest.mark.parametrize(
    ("faults", "ends"),
    [
        ([Fault(1.5, "kill-rank", "d0", value=2)], 1),
        ([Fault(1.5, "stall-rank", "d0", seconds=0.3, value=1)], 0),
        ([Fault(1.5, "stall-rank", "d0", seconds=4.0, value=1)], 1),
        ([Fault(1.5, "step", "d0", value=0)], 1),
        ([Fault(1.5, "step", "d0", value=1)], 1),
    ],
)
def test_a_worker_ends_with_one_of_its_ranks(faults, ends):
    """And with a step that one of them has not computed; not with one that only lags."""
    scenario = make_scenario(6)
    decode = tuple(
        (config, replace(machine, ranks=4, heads=2, collective_seconds=1.0))
        for config, machine in scenario.decode
    )
    prefill = tuple((config, replace(machine, heads=2)) for config, machine in scenario.prefill)
    lines = []
    outcome = run_scenario(
        replace(scenario, decode=decode, prefill=prefill, faults=tuple(faults)), trace=lines.append
    )
    assert not outcome.failure
    assert outcome.requests["finished"] > 0.5 * len(scenario.requests)
    assert sum("d0" in line and "starts, life" in line for line in lines) == 1 + ends


@pytest.mark.parametrize(("times", "ends"), [(1, "finished"), (60, "INTERNAL")])
def test_a_request_counts_as_the_cause_when_nodes_hang_in_its_turns_by_chance(times, ends):
    """With one hang of each decode node it is suspected, then has a turn that is lost; with more, another."""
    base = next(s for s in map(make_scenario, range(100)) if len(s.decode) == 2)
    ranks = {"ranks": 2, "heads": 2, "collective_seconds": 0.5}
    decode = tuple(
        (replace(config, local_prefill_tokens=99), replace(machine, **ranks))
        for config, machine in base.decode
    )
    prefill = tuple((config, replace(machine, ranks=1, heads=2)) for config, machine in base.prefill)
    request = replace(base.requests[0], at=1.0, timeout=15.0, cancel_after=None)
    scenario = replace(
        base,
        prefill=prefill,
        decode=decode,
        requests=(replace(request, params=replace(request.params, seed=1)),),
        gateway=replace(base.gateway, silence=30.0, max_resumes=8, wait=30.0),
        faults=tuple(
            Fault(1.0 + time / 20, "hang", node, seconds=9.0)
            for time in range(times)
            for node in ("d0", "d1")
        ),
    )
    outcome = run_scenario(scenario)
    assert not outcome.failure, outcome
    assert outcome.requests == {ends: 1}


def test_a_node_that_drains_takes_no_more_requests():
    scenario = next(s for s in map(make_scenario, range(100)) if len(s.decode) == 2)
    cluster = SimCluster(replace(scenario, faults=()))
    cluster.processes["d0"].drain()
    cluster.run()
    taken = {name: cluster.processes[name].core.counters.prompt_tokens for name in ("d0", "d1")}
    assert taken["d0"] == 0 < taken["d1"]


def _trace(seed, hash_seed):
    code = f"""
import sys
from baton.sim.run import run_scenario
from baton.sim.scenario import make_scenario
print(run_scenario(make_scenario({seed}), trace=lambda line: sys.stdout.write(line + "\\n")))
"""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    return done.stdout


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (5, 21))])
def test_a_seed_replays_byte_for_byte_in_another_process(seed):
    first = _trace(seed, "1")
    assert first == _trace(seed, "2")
    assert first.count(b"\n") > 100
    assert first != _trace(seed + 1, "1")


def test_tracing_changes_nothing():
    lines = []
    assert run_scenario(make_scenario(5), trace=lines.append) == run_seed(5)
    assert lines[-1].endswith("well")


def test_a_run_ends_after_so_many_steps():
    assert run_seed(5, max_steps=100).steps == 100


def test_a_failing_seed_shrinks_to_a_small_one():
    with planted("failed-pull"):
        seed = next(seed for seed in range(100) if run_seed(seed).rule == "tokens")
        scenario = make_scenario(seed)
        smaller, outcome = shrink(scenario, "tokens")
        assert outcome.rule == "tokens" and run_scenario(smaller) == outcome
        assert len(smaller.requests) <= 3 and len(smaller.faults) <= 2
        assert len(smaller.requests) < len(scenario.requests)
    assert not run_scenario(smaller).failure, "what fails is the planted bug"


def test_only_what_fails_can_be_shrunk():
    with pytest.raises(ValueError, match="nothing broken"):
        shrink(make_scenario(5), "tokens")


def test_a_bug_is_dug_out_again():
    before = run_seed(1)
    for name in BUGS:
        with planted(name):
            pass
    assert run_seed(1) == before
    with pytest.raises(KeyError), planted("no such bug"):
        pass


# --- its parts ----------------------------------------------------------------------------------------------


def test_events_of_a_stalled_actor_wait_in_their_order_and_those_of_a_dead_one_are_dropped():
    world, actor, dead = World(1), Actor("a"), Actor("d")
    seen = []
    for number in range(3):
        world.at(1.0 + number / 10, actor, lambda number=number: seen.append((number, world.now)))
    world.at(0.5, dead, lambda: seen.append("dead"))
    actor.stall(2.0)
    dead.alive = False
    while world.step():
        pass
    assert seen == [(0, 2.0), (1, 2.0), (2, 2.0)]


class Host:
    def __init__(self, name):
        self.name, self.loop, self.got = name, Actor(name), []

    def accept(self, endpoint):
        endpoint.on_message = self.got.append
        endpoint.on_end = self.got.append


@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_keeps_its_order_also_over_a_cut(cut):
    world = World(3)
    network, near, far = Network(world, 0.02), Host("a"), Host("b")
    network.register(far)
    endpoint = network.connect(near, "b")
    for number in range(20):
        world.at(number * 0.01, near.loop, lambda number=number: endpoint.send(number))
    if cut:
        world.at(0.05, near.loop, lambda: network.cut("a", "b", 0.4))
    while world.step():
        pass
    assert far.got == list(range(20))


def test_a_long_cut_ends_the_stream_on_both_sides():
    world = World(3)
    network, near, far = Network(world, 0.02), Host("a"), Host("b")
    network.register(far)
    endpoint = network.connect(near, "b")
    endpoint.on_end = near.got.append
    network.cut("a", "b", 100.0)
    endpoint.send("lost")
    while world.step() and world.now < 50:
        pass
    assert near.got == far.got == ["no answer to pings"]
    assert not endpoint.send("more") and network.connect(near, "b") is not None


def test_one_wrong_byte_in_a_page_changes_the_output():
    """What the whole method rests on: the model attends to every byte."""
    cluster = SimCluster(make_scenario(6))
    decode = next(process for name, process in cluster.processes.items() if name == "d0")
    original = decode.runner.execute

    def flip(launched_step):
        for row in launched_step.plan.rows:
            page = row.tables[0][0]
            if row.start > 4:
                decode.pool.data[page * decode.pool.page_bytes + 3] ^= 1
        original(launched_step)

    decode.runner.execute = flip
    with pytest.raises(Violation, match="tokens"):
        cluster.run()


def test_reference_stops_after_a_stop_token():
    tokens = reference(range(5), 7, 10)
    assert len(tokens) == 10
    assert reference(range(5), 7, 10, frozenset({tokens[4]})) == tokens[: tokens.index(tokens[4]) + 1]
    assert SimPool(2, 4).read(1, 0, 4) == b"\xee" * 4


@pytest.mark.thorough
def test_a_killed_run_leaves_nothing():
    """Its processes hold none of its descriptors, and end with it."""
    run = textwrap.dedent("""
        import os
        from baton.sim.run import run_many
        outcomes = run_many(range(4000), max_steps=200, jobs=2)
        next(outcomes)
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        print(*(pid for pid in pids if os.getsid(pid) == os.getsid(0)), flush=True)
        os.kill(os.getpid(), 9)
    """)
    child = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, start_new_session=True)
    output, _ = child.communicate(timeout=240)  # to the end of the pipe
    started = [int(pid) for pid in output.split()]
    assert len(started) >= 4  # itself, what forks, two that simulate
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, f"left of {started}"
        time.sleep(0.05)
