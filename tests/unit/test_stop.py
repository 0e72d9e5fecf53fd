"""Stop strings: the outcome depends on the text alone, and nothing is held back without need."""

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.gateway.stop_strings import StopMatcher

# Short pieces over few letters: most matches lie across a border.
PIECES = st.lists(st.text("ab", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=3)


def run(stops, pieces):
    matcher = StopMatcher(stops)
    shown = [matcher.feed(piece) for piece in pieces]
    return "".join(shown) + matcher.flush(), matcher.matched


def obvious(stops, text):
    """Character by character: the first end of a match wins; there, the longest."""
    for end in range(len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            longest = max(here, key=len)
            return text[: end - len(longest)], longest
    return text, ""


@settings(max_examples=500)
@given(STOPS, PIECES)
def test_as_the_obvious_matcher_whatever_the_borders(stops, pieces):
    assert run(stops, pieces) == obvious(stops, "".join(pieces))


@settings(max_examples=500)
@given(STOPS, PIECES)
def test_holds_back_only_what_may_become_a_stop_string(stops, pieces):
    matcher = StopMatcher(stops)
    text = shown = ""
    for piece in pieces:
        text += piece
        shown += matcher.feed(piece)
        if matcher.matched:
            return
        held = text[len(shown) :]
        assert shown + held == text
        assert not held or any(len(stop) > len(held) and stop.startswith(held) for stop in stops)
        # ... and nothing that may was shown: whatever end of the text begins a stop string is within held.
        for size in range(len(held) + 1, len(text) + 1):
            assert not any(len(stop) > size and stop.startswith(text[-size:]) for stop in stops)


def test_across_borders():
    matcher = StopMatcher(["</answer>"])
    assert matcher.feed("yes<") == "yes"
    assert matcher.feed("/ans") == ""
    assert matcher.feed("wer> and more") == ""
    assert matcher.matched == "</answer>"
    assert matcher.feed("never shown") == ""
    assert matcher.flush() == ""


def test_a_false_alarm_is_shown():
    matcher = StopMatcher(["\n\nUser"])
    assert matcher.feed("a\n\nUs") == "a"
    assert matcher.feed("ing") == "\n\nUsing"


def test_without_stop_strings_everything_passes():
    assert run([], ["a", "b"]) == ("ab", "")


def test_the_match_that_ends_first_wins_and_of_those_the_longest():
    for pieces in (["xabcd"], ["xab", "cd"], list("xabcd")):
        assert run(["abcd", "bc"], pieces) == ("xa", "bc")
        assert run(["bc", "abc", "d"], pieces) == ("x", "abc")
