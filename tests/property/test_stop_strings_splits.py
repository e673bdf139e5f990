"""However a text is cut, stop strings agree with watching it character by character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings

stop_lists = st.lists(st.text("ab<é", min_size=1, max_size=5), max_size=4)
chunk_lists = st.lists(st.text("ab<é", max_size=6), max_size=12)


def naive(text, stops):
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stop_lists, chunk_lists)
@settings(max_examples=1000, deadline=None)
def test_equals_the_naive_search_under_any_split(stops, chunks):
    stop_strings = StopStrings(stops)
    shown, matched = "", None
    for chunk in chunks:
        text, matched = stop_strings.add(chunk)
        shown += text
        if matched is not None:
            break
    shown += stop_strings.finish()
    assert (shown, matched) == naive("".join(chunks), stops)


@given(stop_lists, chunk_lists)
@settings(max_examples=500, deadline=None)
def test_holds_back_no_more_than_the_longest_possible_start(stops, chunks):
    stop_strings = StopStrings(stops)
    seen, shown = "", ""
    for chunk in chunks:
        text, matched = stop_strings.add(chunk)
        if matched is not None:
            return
        seen, shown = seen + chunk, shown + text
        starts = {stop[:size] for stop in stops for size in range(1, len(stop))}
        needed = max((len(start) for start in starts if seen.endswith(start)), default=0)
        assert len(seen) - len(shown) == needed
