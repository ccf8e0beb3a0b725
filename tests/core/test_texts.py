"""Texts of figures, texts without control characters, and stop texts."""

import random

from specdemo.core.errors import plain_text
from specdemo.core.formats import format_bytes, kilobytes, latency, megabytes, number, percent
from specdemo.core.texts import StopTexts


def test_texts_of_figures() -> None:
    assert [format_bytes(n) for n in (None, 999, 1e3, 65e6, 123e6, 1.25e9)] == [
        "–", "999 bytes", "1.0 kB", "65.0 MB", "123 MB", "1.2 GB",
    ]  # fmt: skip
    assert [number(x) for x in (None, 1.234)] == ["–", "1.23"] and number(2.25, 1, "-") == "2.2"
    assert [latency(x) for x in (None, 0.0, 0.0504, 1.0, 1.5)] == ["–", "0 ms", "50 ms", "1.00 s", "1.50 s"]
    assert (percent(None), percent(0.456), percent(0.5, space=""), percent(1.0)) == ("–", "46 %", "50%", "100 %")
    assert (kilobytes(1234.56e3), megabytes(1_234_567_890), megabytes(None)) == ("1,234.6", "1,234.6", "–")


def test_plain_text_has_no_control_characters_and_a_limit() -> None:
    assert plain_text("a\x07b\u200ec\u2028d\u2029é") == "a b c d é"
    assert plain_text("a\ud800\ue000b") == "a  b"
    assert plain_text("abc", 3) == "abc" and plain_text("abcd", 3) == "abc …"


STOPS = ("ab", "bca", "cc", "abca")


def shown_by_definition(text: str) -> tuple[str, int]:
    """Return the text and the number of read characters: search all stop texts after each character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in STOPS if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], end
    return text, len(text)


def test_characters_are_shown_up_to_the_first_stop_text() -> None:
    """One by one, and in pieces: a stop text within a piece ends the text before its first occurrence."""
    rng, stopped = random.Random(5), 0
    for _ in range(1000):
        text = "".join(rng.choices("abcd", k=9))
        stops = StopTexts(STOPS)
        shown = stops.feed(text, last=True)
        expected, read = shown_by_definition(text)
        assert "".join(shown) == expected and len(shown) == read
        assert stops.reached == (expected != text)
        stopped += stops.reached
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        stops = StopTexts(STOPS)
        shown = stops.feed(pieces, last=True)
        whole = "".join(pieces[: len(shown)])
        starts = [start for stop in STOPS if (start := whole.find(stop)) >= 0]
        assert "".join(shown) == whole[: min(starts, default=len(whole))]
        assert stops.reached == (expected != text)
    assert 250 < stopped < 1000


def test_only_a_possible_beginning_is_withheld() -> None:
    stops = StopTexts(["\n\nUser:"])
    assert stops.feed(["Yes.", "\n", "\nUs", "e", "d"]) == ["Yes.", "", "", "", "\n\nUsed"]
    assert stops.feed(["?\n"]) + stops.feed(["\nU"]) + stops.feed([]) + stops.feed(["-"]) == ["?", "", "\n\nU-"]
    assert stops.feed([" \n\nUser", ": more", "lost"]) == [" ", ""] and stops.reached
    assert stops.feed(["later"], last=True) == []
