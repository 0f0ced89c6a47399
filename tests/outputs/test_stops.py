"""Stop strings are found however the text is split, and no part of them is output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.outputs.stops import StopStrings


def through(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None, list[str]]:
    """The output text, the stop string that ended it, and the output of each piece."""
    checker = StopStrings(stops, include)
    shown = []
    for piece in pieces:
        text, stop = checker.push(piece)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    shown.append(checker.finish())
    return "".join(shown), None, shown


def test_a_stop_string_across_pieces_is_found_and_not_shown() -> None:
    assert through(["</end>"], ["one <", "/e", "nd> two"])[:2] == ("one ", "</end>")
    assert through(["</end>"], ["one <", "/e", "nd> two"], include=True)[:2] == ("one </end>", "</end>")


def test_text_that_may_begin_a_stop_string_is_held_and_then_released() -> None:
    assert through(["STOP"], ["a ST", "AY"])[2] == ["a ", "STAY", ""]
    assert through(["STOP"], ["a ST"])[2] == ["a ", "ST"]


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    assert through(["\n\n"], ["one", " two", "\n", "three"])[2] == ["one", " two", "", "\nthree", ""]


def test_text_that_is_not_searched_never_matches() -> None:
    checker = StopStrings(["ab"])
    assert checker.push("xaby", search=False) == ("xaby", None)
    assert checker.push("a", search=False) == ("a", None)
    assert checker.push("b") == ("b", None)


signs = st.text(alphabet="abc", max_size=14)


@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(signs),
    st.booleans(),
)
def test_the_split_into_pieces_does_not_matter(stops: list[str], pieces: list[str], include: bool) -> None:
    whole = "".join(pieces)
    text, stop, _ = through(stops, pieces, include)
    assert (text, stop) == through(stops, [*whole], include)[:2]
    if stop is None:
        assert text == whole and not any(found in whole for found in stops)
    else:
        at = whole.find(stop, len(text) - (len(stop) if include else 0))
        assert text == whole[: at + len(stop)] if include else whole.startswith(text + stop)
        assert not any(found in (text if not include else text[:-1]) for found in stops)
