"""The search for the fewest nodes, and what `baton plan` prints."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from baton.cli.main import cli
from baton.cli.plan import _words
from baton.sizing.search import Goal, Kinds, impossible, search
from baton.sizing.simulation import NodeLayout, NodeUsage, Simulated
from baton.sizing.traffic import Arrival, Traffic, TrafficWork
from baton.slo import RequestTimes, Targets
from baton.step_cost import StepCost

GOAL = Goal(Targets(ttft_ms=100, itl_ms=20), part=0.9)
NODE = NodeUsage(0.5, 1, 2)


def outcome(layout, late, slow):
    """Of ten requests so many miss the TTFT, and so many others the ITL."""
    records = []
    for number in range(10):
        first = 0.5 if number < late else 0.05
        gap = 0.05 if number >= 10 - slow else 0.01
        records.append(RequestTimes(0.0, 0.0, [(first, 1), (first + gap, 1)], first + gap, output_tokens=2))
    return Simulated(layout, records, 1.0, NODE if layout.prefill else None, NODE, 0)


AUTO = Kinds(split=("auto",))
SPLIT = Kinds(split=("auto",), aggregated=False)


def run(works, work=None, most=8, kinds=AUTO):
    """`works`: layout -> (late, slow)."""
    return search(
        work or TrafficWork(0.5, 0.5, 0, 0), GOAL, most, lambda layout: outcome(layout, *works(layout)), kinds
    )


def tried(plan):
    return [(each.layout.prefill, each.layout.decode) for each in plan.tried]


def test_the_first_layouts_that_do_are_taken():
    plan = run(lambda layout: (0, 0) if layout.nodes >= 2 else (5, 0))
    assert tried(plan) == [(0, 1), (0, 2), (1, 1)]
    assert plan.best.layout == NodeLayout(0, 2) and plan.split.layout == NodeLayout(1, 1)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (NodeLayout(0, 1), "1 decode node, aggregated"),
        (NodeLayout(0, 2), "2 decode nodes, aggregated"),
        (NodeLayout(2, 1, "always"), "2 prefill and 1 decode node with --split always"),
    ],
)
def test_the_words_for_a_layout(layout, words):
    assert _words(outcome(layout, 0, 0)) == words


def test_the_walk_goes_where_more_requests_miss_their_target():
    # Of four nodes only three prefill nodes and a decode node do.
    plan = run(
        lambda layout: (0, 0) if layout == NodeLayout(3, 1) else (5, 1),
        kinds=SPLIT,
    )
    assert plan.best.layout == NodeLayout(3, 1)
    assert tried(plan) == [(1, 1), (2, 1), (2, 2), (3, 1)]
    plan = run(
        lambda layout: (0, 0) if layout == NodeLayout(1, 3) else (1, 5),
        kinds=SPLIT,
    )
    assert plan.best.layout == NodeLayout(1, 3)


def test_where_auto_does_not_do_all_prompts_are_handed_off():
    plan = run(lambda layout: (0, 0) if layout.split == "always" else (0, 5), kinds=Kinds(aggregated=False))
    assert plan.best.layout == NodeLayout(1, 1, "always")
    assert [each.layout.split for each in plan.tried] == ["auto", "always"]


def test_the_walk_begins_as_the_work_is_divided():
    plan = run(lambda layout: (0, 0), TrafficWork(3.0, 0.7, 0.2, 0.1), kinds=SPLIT)
    assert tried(plan) == [(3, 1)]


def test_the_search_ends_beside_what_it_has_found_and_at_its_limit():
    plan = run(lambda layout: (0, 0) if layout == NodeLayout(1, 1) else (0, 5))
    assert plan.best.layout == NodeLayout(1, 1) and plan.aggregated is None
    assert max(layout for layout in tried(plan) if not layout[0]) == (0, 4)
    plan = run(lambda layout: (0, 5), most=3)
    assert plan.best is None and max(sum(layout) for layout in tried(plan)) == 3
    assert run(lambda layout: (0, 0), TrafficWork(9, 9, 0, 0)).tried == [], "the work alone takes more nodes"


def test_nine_of_ten_are_enough_where_nine_of_ten_are_asked_for():
    assert run(lambda layout: (1, 0)).best.layout.nodes == 1
    assert run(lambda layout: (1, 1)).best is None


def test_targets_that_no_node_can_meet_are_told_at_once():
    cost = StepCost(fixed=20e-3, row=0, key=0, token=1e-3, pair=0)

    def why(ttft, itl, *, budget=512, turn=0.0, part=0.5, output=9):
        load = Traffic(tuple(Arrival(i, 300 + 300 * (i > 5), output) for i in range(10)), 0, 10)
        return impossible(load, Goal(Targets(ttft, itl), part), cost, budget, turn)

    assert "takes 22.0 ms" in why(None, 21, turn=2e-3) and why(None, 23, turn=2e-3) == ""
    assert why(None, 21, turn=2e-3, output=1) == "", "of one token there is no ITL"
    assert "320 ms by itself" in why(319, None) and why(321, None) == ""
    assert "340 ms" in why(319, None, budget=256), "a prompt of two steps"
    assert "600 tokens" in why(321, None, part=0.7), "six of ten are no seven"


# --- the command --------------------------------------------------------------------------------------

PROFILE = {
    "step": {"fixed": 10e-3, "row": 1e-4, "key": 1e-7, "token": 1e-4, "pair": 1e-9},
    "engine": {"page_size": 16, "kv_tokens": 32768, "context_length": 2048},
    "pull": {"transport": "shm", "latency": 1e-3, "bytes_per_second": 4e9},
    "host": {"turn": 2e-4, "row": 1e-5, "request": 2e-3, "hop": 5e-4},
}
QUESTION = ("--rate", "14", "--prompt", "200-600", "--output", "10-30", "--requests", "60")

GOLDEN = """\
60 requests at 14.09 a second, 403 tokens in and 19 out on average; TTFT 300 ms and ITL 25 ms for 95.0%
layout         TTFT p50  p99, ms  ITL p50  p99, ms  TPOT, ms  tok/s out  goodput     met       busy      held
1 aggregated      119.3    236.4     12.9     62.2      30.3        291     0.00    0.0%        98%       30%
2 aggregated       59.6    130.8     10.7     60.2      14.4        291     3.79   25.0%        92%        7%
1 + 1              74.5    177.4     10.9     49.1      12.2        291     8.84   58.3%  54% + 96%  4% + 13%
1 + 1, always     107.6    235.9     10.7     11.3      10.8        291    15.15  100.0%  71% + 94%  5% + 11%
3 aggregated       58.0    117.4     10.5     56.3      12.1        291     7.07   46.7%        80%        5%
4 aggregated       54.7     87.5     10.4     47.6      11.3        291     9.34   61.7%        72%        3%
Take 1 prefill and 1 decode node with --split always: \
15.15 requests a second meet the targets, 100.0% of all. Aggregated, 4 nodes do not meet the targets.
"""


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return str(path)


def plan(*arguments):
    environment = {"COLUMNS": "60", "TERM": "dumb"}
    return CliRunner().invoke(cli, ["plan", *arguments], standalone_mode=False, env=environment)


def test_what_is_printed(profile, tmp_path):
    file = tmp_path / "plan.json"
    goal = ("--ttft", "300", "--itl", "25", "--goodput-part", "0.95", "--json", str(file))
    found = plan(profile, *QUESTION, *goal)
    assert found.exception is None and found.return_value == 0
    assert [line.rstrip() for line in found.output.strip().splitlines()] == GOLDEN.strip().splitlines()
    report = json.loads(file.read_text())
    assert report["best"] == {"prefill": 1, "decode": 1, "split": "always"} == report["split"]
    assert report["traffic"]["requests"] == 60 and report["targets"]["part"] == 0.95
    assert [(one["prefill"], one["decode"]) for one in report["layouts"]][:2] == [(0, 1), (0, 2)]
    assert all(one["goodput_part"] == one["met"] / 60 for one in report["layouts"])


def test_no_layout_is_told_and_is_an_exit_code(profile):
    found = plan(profile, *QUESTION, "--ttft", "90", "--itl", "25", "--max-nodes", "2")
    assert found.return_value == 1
    assert "No layout of at most 2 nodes meets the targets" in found.output
    assert "raise --max-nodes" in plan(profile, "--rate", "500", "--max-nodes", "3").output


def test_sizes_may_differ_from_those_measured(profile):
    small = plan(profile, *QUESTION, "--layouts", "aggregated", "--max-nodes", "1", "--kv-tokens", "2048")
    roomy = plan(profile, *QUESTION, "--layouts", "aggregated", "--max-nodes", "1")
    held = [found.output.strip().splitlines()[2].split()[-1] for found in (small, roomy)]
    assert int(held[0].rstrip("%")) > 2 * int(held[1].rstrip("%"))


def test_a_trace_replaces_rate_and_lengths(profile, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([{"at": i / 4, "prompt": 200, "output": 5} for i in range(20)]))
    found = plan(profile, "--trace", str(trace), "--ttft", "200")
    assert "20 requests at 4.00 a second, 200 tokens in and 5 out" in found.output and found.return_value == 0
    assert "leave out --rate" in str(plan(profile, "--trace", str(trace), "--rate", "3").exception)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "--rate"),
        (("--rate", "1", "--prompt", "x"), "is no length"),
        (("--rate", "1", "--prompt", "4000"), "do not fit into the context of 2048"),
        (("--rate", "1", "--itl", "5"), "no number of nodes meets these targets: a step with one row"),
        (("--rate", "1", "--prompt", "600", "--ttft", "20"), "a prompt of 600 tokens takes"),
        (("--rate", "1", "--kv-tokens", "3"), "at least one page"),
        (("--rate", "1", "--token-budget", "9"), "must be at least --max-rows"),
    ],
)
def test_mistakes_are_told(profile, arguments, text):
    assert text in str(plan(profile, *arguments).exception)


def test_a_profile_of_steps_alone_says_what_is_assumed(profile, tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"step": PROFILE["step"]}))
    found = plan(str(path), *QUESTION, "--max-nodes", "1")
    assert "the profile has no engine, pull, host" in found.output
    path.write_text("{}")
    assert "is no profile" in str(plan(str(path), "--rate", "1").exception)


def test_ranks_are_counted(tmp_path):
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(PROFILE | {"engine": {**PROFILE["engine"], "ranks": 2, "device": "cuda"}}))
    said = plan(str(path), *QUESTION, *("--ttft", "300", "--itl", "25", "--goodput-part", "0.95")).output
    assert "Take 1 prefill and 1 decode node with --split always, of 2 ranks each (4 GPUs): 15" in said
