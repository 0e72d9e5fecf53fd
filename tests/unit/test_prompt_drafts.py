"""Drafters on prefill nodes: what fails costs drafts, not prompts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from eagle3_heads import HIDDEN, random_head, save_head

from baton.config import PrefillConfig
from baton.engine.draft.heads import HeadDrafter
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.warmup import StepLimits
from baton.handoff.messages import DraftsAnnounced
from baton.rpc.address import new_incarnation
from baton.worker.engine import build_engine
from baton.worker.memory import run_largest_steps
from baton.worker.prefill.prompt_drafts import PromptDrafts
from rig import VOCAB, save_checkpoint


class Attempt(SimpleNamespace):
    """Known by its identity, as real ones are."""

    __hash__ = object.__hash__


@pytest.mark.parametrize("fails", ["observe", "fill"])
def test_a_drafter_that_fails_is_asked_nothing_more_and_prompts_go_on(fails):
    calls: list[str] = []

    def called(name: str) -> None:
        calls.append(name)
        if name == fails:
            raise RuntimeError("out of memory")

    drafter = SimpleNamespace(
        observe=lambda *_: called("observe"),
        fill=lambda _: called("fill"),
        slots=SimpleNamespace(cache=None),
        device=torch.device("cpu"),
    )
    outputs: list[Any] = []
    sequence = SimpleNamespace(retired=4)
    request = SimpleNamespace(sequences=[sequence])
    sequence.request = request
    attempt = Attempt(
        lends_drafts=True,
        complete_since=1.0,
        request=request,
        holder="decode",
        name="a",
        drafts=None,
        core=SimpleNamespace(leases=SimpleNamespace(outputs=outputs)),
    )
    drafts = PromptDrafts(cast(Any, drafter))
    step = SimpleNamespace(records=[SimpleNamespace(sequence=sequence, end=4)])
    result = SimpleNamespace(rows=[SimpleNamespace(hidden=[0] * 4)])

    for _ in range(2):
        drafts.committed(cast(Any, step), cast(Any, result), lambda _: cast(Any, attempt))
        drafts.compute()
    assert "out of memory" in drafts.broken
    assert calls == ["observe", "fill"][: 1 + (fails == "fill")]
    assert outputs == [("decode", DraftsAnnounced("a", (), 0))] * 2


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
            forward = drafter._head.forward
            monkeypatch.setattr(
                drafter._head, "forward", lambda *own: (passes.append(len(own[0])), forward(*own))[1]
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
