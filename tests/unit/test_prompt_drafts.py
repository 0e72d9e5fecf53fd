"""Drafters on prefill nodes: what fails costs drafts, not prompts."""

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from core_shell import Shell
from eagle3_heads import HIDDEN, random_head, save_head

from baton.config import PrefillConfig
from baton.engine.draft.heads import HeadDrafter
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_loop import StepPipeline
from baton.engine.warmup import StepLimits
from baton.handoff.messages import AttemptName, DraftsAnnounced, FirstSampled, GroupPages, PrefillFailed
from baton.rpc.address import new_incarnation
from baton.worker.engine import build_engine
from baton.worker.memory import run_largest_steps
from baton.worker.prefill.core import PrefillCore
from baton.worker.prefill.prompt_drafts import PromptDrafts
from rig import VOCAB, save_checkpoint


class Attempt(SimpleNamespace):
    """Known by its identity, as real ones are."""

    __hash__ = object.__hash__


class Steps:
    """Launched, read and told by hand; each has the end of one prompt. `calls`: what was done, in order."""

    def __init__(self, fails: str = "", device: Any = torch.device("cpu")) -> None:  # noqa: B008
        self.calls: list[str] = []
        self.outputs: list[Any] = []
        self._fails = fails
        table = SimpleNamespace(tables=[[3]])
        names = ("observe", "fill", "keep")
        drafter = SimpleNamespace(
            **{name: lambda *_, name=name: self.called(name) for name in names},
            filled=lambda _: (SimpleNamespace(slot=0, block_table=table), 3),
            lend=lambda _: table,
            slots=SimpleNamespace(cache=SimpleNamespace(page_size=4, generation=lambda page: 10 * page)),
            device=device,
        )
        self.drafts = PromptDrafts(cast(Any, drafter))

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fails:
            raise RuntimeError("out of memory")

    def launch(self, number: int) -> Any:
        sequence = SimpleNamespace(request=SimpleNamespace())
        leases = SimpleNamespace(outputs=self.outputs)
        names = {"holder": "decode", "name": number, "core": SimpleNamespace(leases=leases)}
        attempt = Attempt(lends_drafts=True, complete_since=1.0, drafts=None, **names)
        record = SimpleNamespace(sequence=sequence, end=4, targets=(sequence,))
        step = SimpleNamespace(plan=SimpleNamespace(number=number), records=[record])
        launched = SimpleNamespace(hidden={0: [0] * 4})
        self.drafts.launched(cast(Any, step), cast(Any, launched), lambda _: cast(Any, attempt))
        return step

    def finish(self, step: Any) -> None:
        self.drafts.committed(step)
        self.drafts.announce()


CALLS = ["observe", "fill", "keep"]


@pytest.mark.parametrize("fails", CALLS)
def test_a_drafter_that_fails_is_asked_nothing_more_and_prompts_go_on(fails):
    steps = Steps(fails)
    for number in range(2):
        steps.finish(steps.launch(number))
    assert "out of memory" in steps.drafts.broken
    assert steps.calls == CALLS[: CALLS.index(fails) + 1]
    assert steps.outputs == [("decode", DraftsAnnounced(number, (), 0)) for number in range(2)]


def test_what_a_gpu_computes_is_announced_when_it_is_there(monkeypatch):
    """A prompt waits for its own, not for that of a later step; nobody waits for that of one that failed."""
    made = count()

    class Event:
        def record(self):
            self.number = next(made)
            steps.calls.append(f"recorded {self.number}")

        def synchronize(self):
            assert len(steps.outputs) == self.number
            steps.calls.append(f"waited {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    steps = Steps(device=SimpleNamespace(type="cuda"))
    first, second = steps.launch(1), steps.launch(2)
    assert not steps.outputs
    for step in (first, second):
        steps.finish(step)
    groups = (GroupPages(0, (3,), (30,)),)
    assert steps.outputs == [("decode", DraftsAnnounced(number, groups, 3)) for number in (1, 2)]
    launched = ["observe", "fill", "recorded 0", "observe", "fill", "recorded 1"]
    assert steps.calls == [*launched, "keep", "waited 0", "keep", "waited 1"]
    failed = steps.launch(3)
    steps.drafts.failed(failed)
    steps.drafts.announce()
    assert len(steps.outputs) == 2 and steps.calls[-1] == "recorded 2"


class Node:
    """A prefill node's core, with a runner, a head and steps that overlap. `early`: as on a GPU; None: as on
    this device."""

    def __init__(self, folder, rows, early: bool | None = True):
        sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
        head = save_head(folder / "head", random_head("midlayer", VOCAB // 4, VOCAB), VOCAB)
        config = PrefillConfig(
            model=str(save_checkpoint(folder / "model", **sizes)),
            draft=str(head),
            device="cpu",
            kv_tokens=2048,
            max_rows=rows,
            token_budget=64,
            transports=("grpc",),
        )
        self.engine = build_engine(config, new_incarnation())
        assert self.engine.drafter is not None
        self.drafter = cast(HeadDrafter, self.engine.drafter.drafter)
        self.outputs: dict[Any, Any] = {}
        """Entries announced, or why it failed, by the attempt's name."""
        self.order: list[Any] = []
        """What was sent."""
        limits = SchedulerConfig(context_length=512, token_budget=64, max_rows=rows)
        drafts = PromptDrafts(self.drafter)
        drafts._early = early if early is not None else drafts._early
        self.core = PrefillCore(self.engine.cache, limits, config, Shell(self.send), prompt_drafts=drafts)
        self.pipeline = StepPipeline(self.core, self.engine.runner, True, lambda: 1.0)

    def send(self, step, outputs, effects):
        for each in outputs["decode"]:
            self.order.append(type(each))
            if isinstance(each, DraftsAnnounced):
                assert sum(len(group.pages) for group in each.groups) == -(-each.entries // 16)
                self.outputs[each.name] = each.entries
            elif isinstance(each, PrefillFailed):
                self.outputs[each.name] = each.reason

    def start(self, number, tokens):
        name = AttemptName(gateway=7, request=number, attempt=0, decode_try=0)
        request = EngineRequest(name, tuple(tokens), SamplingParams())
        self.core.leases.connect("decode", 0.0)
        self.core.start("decode", name, request, True, 0.0, drafts=True)
        return name

    def run(self):
        while not self.pipeline.idle:
            self.turn()
        self.pipeline.idle = False

    def turn(self):
        due = self.pipeline.begin()
        if due is not None:
            self.pipeline.finish(due)

    def found(self, tokens):
        """Pages of the prompt that later ones find."""
        (sequence,) = EngineRequest("later", tuple(tokens), SamplingParams()).sequences
        kv = self.drafter.room(sequence, len(tokens) - 1, len(tokens))
        assert kv is not None
        self.drafter.slots.drop(kv)
        return kv.found

    def close(self):
        """Once nothing is lent, all pages can be taken."""
        assert not self.core.prompt_drafts.broken
        for name in list(self.core.leases.running):
            self.core.leases.release("decode", name)
        slots = self.drafter.slots
        for kv in list(slots._kept):
            slots.drop(kv)
        slots.cache.check(idle=True)
        self.engine.close()


def test_on_a_cpu_the_first_token_waits_for_no_pass_of_the_drafter(tmp_path):
    node = Node(tmp_path, 4, early=None)
    fill = node.drafter.fill
    node.drafter.fill = lambda prompts: (node.order.append("filled"), fill(prompts))
    (prompt,) = texts(40)
    name = node.start(1, prompt)
    node.run()
    assert node.outputs == {name: 39} and node.found(prompt) == 2
    assert node.order.index(FirstSampled) < node.order.index("filled") < node.order.index(DraftsAnnounced)
    node.close()


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, 4)
    yield node
    node.close()


def texts(*lengths):
    return [[(7 * i + 31 * n) % 250 for i in range(length)] for n, length in enumerate(lengths, 1)]


def test_what_is_computed_behind_a_step_is_found_and_told_once_that_is_read(node):
    """Prompts of one chunk and of several, beside each other and one behind the other."""
    prompts = texts(40, 20, 150, 30, 24, 33)
    names = [node.start(number, prompt) for number, prompt in enumerate(prompts)]
    fill, known = node.drafter.fill, []
    node.drafter.fill = lambda each: (fill(each), known.append((dict(node.outputs), node.found(prompts[0]))))
    node.turn()
    node.turn()
    assert known[0] == ({}, 0) and not known[1][0], "the step before has not been read"
    assert node.found(prompts[0]) == 2 and node.outputs[names[0]] == 39
    node.run()
    assert node.outputs == {name: len(prompt) - 1 for name, prompt in zip(names, prompts, strict=True)}
    assert [node.found(prompt) for prompt in prompts] == [2, 1, 9, 1, 1, 2]


@pytest.mark.parametrize("ends", ["read", "cancel", "row"])
def test_nobody_finds_or_hears_of_what_follows_on_a_step_that_fails(node, ends, monkeypatch):
    """Of the chunks before it what has been read is found: but for pages that hold no numbers."""
    (prompt, other) = texts(150, 40)
    name = node.start(1, prompt)
    runner = node.engine.runner
    read = runner.read

    def failing(launched):
        if launched.number != 2:
            return read(launched)
        if ends == "cancel":
            node.core.cancel("decode", name)
        if ends != "row":
            raise RuntimeError("no answer")
        result = read(launched)
        result.rows[0].error = "no numbers"
        return result

    monkeypatch.setattr(runner, "read", failing)
    node.turn()
    node.turn()
    assert node.found(prompt) == 3
    node.run()
    assert node.outputs == {name: "STEP_FAILED" if ends != "row" else "BAD_LOGITS"}
    assert node.found(prompt) == 3
    assert not node.core.prompt_drafts._launched
    after = node.start(2, other)
    node.run()
    assert node.outputs[after] == 39


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_prompt_that_is_cancelled_gives_back_what_follows_on_its_steps(node, steps):
    """At any time; what has been read is found by others."""
    prompt = texts(150)[0]
    name = node.start(1, prompt)
    for _ in range(steps):
        node.turn()
    node.core.cancel("decode", name)
    node.run()
    found = node.found(prompt)
    assert found == (0, 3, 7, 9)[steps - 1]
    assert (node.outputs[name] == "CANCELLED") and not node.core.prompt_drafts._launched


@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_the_largest_steps_have_the_largest_pass_of_a_drafter_beside_them(tmp_path, kind, monkeypatch):
    """As many tokens as the budget has; no prompt finds any of it."""
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 32, "num_hidden_layers": 4}
    model = draft = save_checkpoint(tmp_path / "model", **sizes)
    if kind == "eagle3":
        draft = save_head(tmp_path / "head", random_head("midlayer", VOCAB // 4, VOCAB), VOCAB)
    options = {"kv_tokens": 2048, "max_rows": 4, "token_budget": 96, "transports": ("grpc",)}
    engine = build_engine(
        PrefillConfig(model=str(model), draft=str(draft), device="cpu", **options), new_incarnation()
    )
    try:
        assert engine.drafter is not None
        drafter, passes = engine.drafter.drafter, list[int]()
        assert isinstance(drafter, PagedDrafter)
        if isinstance(drafter, HeadDrafter):
            write = drafter._head.write
            monkeypatch.setattr(
                drafter._head, "write", lambda *own: (passes.append(len(own[0])), write(*own))[1]
            )
        else:
            runner = cast(Any, drafter)._runner
            launch = runner.launch
            monkeypatch.setattr(
                runner, "launch", lambda plan: (passes.append(plan.num_tokens), launch(plan))[1]
            )
        cache, page = drafter.slots.cache, engine.layout.page_size
        free = cache.available
        run_largest_steps(engine.runner, StepLimits(96, 1024, page, engine.pool.num_pages), drafter)
        assert passes == [96]
        assert cache.available == free
        cache.check(idle=True)
        (sequence,) = EngineRequest("asked", (0,) * 97, SamplingParams()).sequences
        found = drafter.room(sequence, 96, 97)
        assert found is not None and not found.found
    finally:
        engine.close()


def test_what_has_made_room_is_not_found(node):
    """It lacks what was computed before, and says so by fewer entries."""
    prompt = texts(150)[0]
    name = node.start(1, prompt)
    node.turn()
    (kv,) = node.drafter.slots._kept
    node.drafter.slots.drop(kv)
    node.run()
    assert node.outputs == {name: 149 - 63} and not node.found(prompt)
