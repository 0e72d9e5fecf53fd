"""Drafters on prefill nodes: what fails costs drafts, not prompts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.handoff.messages import DraftsAnnounced
from baton.worker.prefill.prompt_drafts import PromptDrafts


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
