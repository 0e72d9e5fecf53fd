"""engine.loop: what other threads may ask of it at any moment."""

from __future__ import annotations

from baton.engine.loop import StepLoop


def test_the_age_of_a_turn_that_begins_meanwhile_is_not_negative():
    now = [10.0]
    loop = StepLoop(object(), object(), name="steps", clock=lambda: now[0], crashed=lambda error: None)

    def begins_a_turn() -> float:
        looked = now[0]
        now[0] = loop._last_turn = now[0] + 1.0  # the step thread, while the caller reads its clock
        return looked

    loop._clock = begins_a_turn
    assert loop.turn_age >= 0.0
