"""Stop strings: what is shown, when, and which one ended the text."""

import pytest

from router.text.stop_strings import StopStrings


def test_without_stops_everything_is_shown_at_once():
    stop_strings = StopStrings([])
    assert stop_strings.add("any text") == ("any text", None)
    assert stop_strings.finish() == ""


def test_holds_back_only_the_possible_start_of_a_stop():
    stop_strings = StopStrings(["END"])
    assert stop_strings.add("the E") == ("the ", None)
    assert stop_strings.add("N") == ("", None)
    assert stop_strings.add("x") == ("ENx", None)
    assert stop_strings.finish() == ""


def test_finish_shows_what_was_held_for_a_stop_that_never_came():
    stop_strings = StopStrings(["</answer>"])
    assert stop_strings.add("text </ans") == ("text ", None)
    assert stop_strings.finish() == "</ans"
    assert stop_strings.finish() == ""


def test_a_match_across_additions_hides_the_stop_and_what_follows():
    stop_strings = StopStrings(["\n\nHuman:"])
    assert stop_strings.add("Hi.\n") == ("Hi.", None)
    assert stop_strings.add("\nHuman: more") == ("", "\n\nHuman:")
    assert stop_strings.add("still more") == ("", "\n\nHuman:")
    assert stop_strings.finish() == ""


def test_the_first_to_end_wins_over_the_first_to_begin():
    assert StopStrings(["abcd", "bc"]).add("xabcd") == ("xa", "bc")


def test_of_two_that_end_together_the_longest_wins_whatever_the_order():
    for stops in (["b", "ab"], ["ab", "b"]):
        assert StopStrings(stops).add("xab") == ("x", "ab")


def test_a_failed_start_may_hide_another_start():
    stop_strings = StopStrings(["aab"])
    assert stop_strings.add("aa") == ("", None)
    assert stop_strings.add("a") == ("a", None)
    assert stop_strings.add("b") == ("", "aab")


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["ok", ""])


def test_long_repetitive_text_takes_one_step_a_character():
    stop_strings = StopStrings(["a" * 5_000 + "b"])
    shown = "".join(stop_strings.add("a" * 100)[0] for _ in range(1_000))
    assert len(shown) == 100_000 - 5_000
    assert stop_strings.add("b") == ("", "a" * 5_000 + "b")
