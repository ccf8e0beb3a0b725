"""Figures computed in one place, their texts, and banned and stop texts."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from specdemo.core.banned_text import BannedText
from specdemo.core.errors import UserError, check_temporary_folder, plain_text
from specdemo.core.formats import format_bytes, kilobytes, latency, megabytes, number, percent
from specdemo.core.stop_text import StopTexts
from specdemo.core.theory import CostTerms, speedup


def test_cost_terms_give_the_measured_speed_up() -> None:
    """Two tokens per step of 0.3 s, against one per pass of 0.1 s: 2/3 of the speed of AR decoding."""
    terms = CostTerms.of(0.8, 4.4, 0.8, drafted=60, steps=20, pass_s=0.1)
    assert (terms.drafted, terms.draft, terms.v, terms.o) == pytest.approx((3.0, 0.4, 2.2, 0.4))
    assert terms.c == pytest.approx(0.4 / 3)
    assert speedup(2.0, terms.drafted, terms.c, terms.v, terms.o) == pytest.approx(2 * 0.1 / 0.3)
    assert CostTerms.of(0.4, 2.2, 0.4, drafted=0, steps=10, pass_s=0.1).c == 0.0


def test_texts_of_figures() -> None:
    assert [format_bytes(n) for n in (None, 999, 1e3, 65e6, 123e6, 1.25e9)] == [
        "–", "999 bytes", "1.0 kB", "65.0 MB", "123 MB", "1.2 GB",
    ]  # fmt: skip
    assert [number(x, 1, "-") for x in (None, 2.25)] == ["-", "2.2"] and percent(0.456) == "46 %"
    assert latency(0.0504) == "50 ms" and latency(1.5) == "1.50 s" and megabytes(1_234_567_890) == "1,234.6"
    assert (latency(None), latency(0.9994), latency(1.0), latency(0.0)) == ("–", "999 ms", "1.00 s", "0 ms")
    assert [number(x) for x in (None, 1.234)] == ["–", "1.23"]
    assert (percent(None), percent(None, "?"), percent(0.5, space=""), percent(0.004)) == ("–", "?", "50%", "0 %")
    assert percent(1.0) == "100 %" and kilobytes(1e9) == megabytes(1e12) == "1,000,000.0"
    for shown, unit in ((kilobytes, 1e3), (megabytes, 1e6)):
        assert (shown(None), shown(1234.56 * unit), shown(1234.56 * unit, 2)) == ("–", "1,234.6", "1,234.56")
    assert [format_bytes(n) for n in (0, 1e6 - 1, 1e6, 1e9 - 1, 1e9, 99.9e9, 100e9, 100e3, 100e6)] == [
        *("0 bytes", "1000 kB", "1.0 MB", "1000 MB", "1.0 GB", "99.9 GB", "100 GB", "100 kB", "100 MB"),
    ]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        call()
    return str(refused.value)


def test_plain_text_has_no_control_characters_and_a_limit() -> None:
    assert plain_text("a\x07b\u200ec\u2028d\u2029é") == "a b c d é"
    assert plain_text("a\ud800\ue000b") == "a  b"
    assert plain_text("abc", 3) == "abc" and plain_text("abcd", 3) == "abc …"


def test_a_missing_temporary_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError

    check_temporary_folder()
    monkeypatch.setattr("tempfile.gettempdir", missing)
    assert refusal(check_temporary_folder) == "no temporary folder is writable: set TMPDIR to a writable directory"


def test_banned_tokens_complete_a_banned_text() -> None:
    """Compare with a search of the text after each token, which may contain or complete a banned text."""
    rng, banned = random.Random(9), 0
    for _ in range(150):
        texts = ["".join(rng.choices("abé", k=rng.randrange(1, 5))) for _ in range(rng.randrange(3))]
        pieces = ["".join(rng.choices("abé", k=rng.randrange(4))).encode() for _ in range(12)]
        pieces += [piece[:1] for piece in pieces] + [piece[1:] for piece in pieces]  # parts of characters, too
        rule = BannedText(texts, pieces)
        for length in range(6):
            path = [rng.randrange(len(pieces) + 2) for _ in range(length)]  # ids beyond the vocabulary have no text
            before = b"".join(pieces[token] for token in path if token < len(pieces))
            expected = {
                token
                for token, piece in enumerate(pieces)
                for text in texts
                if any((before + piece).endswith(text.encode(), 0, end) for end in ends(before, piece))
            }
            assert rule.tokens(path) == expected
            banned += len(expected)
    assert banned > 1000


def ends(before: bytes, piece: bytes) -> range:
    """Return the lengths of the text that end within `piece`."""
    return range(len(before) + 1, len(before + piece) + 1)


STOPS = ("ab", "bca", "cc", "abca")


def shown_by_definition(text: str) -> tuple[str, int]:
    """Return the text and the number of read characters: search all stop texts after each character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in STOPS if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], end
    return text, len(text)


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=4))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_characters_are_shown_up_to_the_first_stop_text() -> None:
    rng, stopped = random.Random(5), 0
    for _ in range(2000):
        text = "".join(rng.choices("abcd", k=9))
        stops = StopTexts(STOPS)
        shown = stops.feed(text, last=True)
        expected, read = shown_by_definition(text)
        assert "".join(shown) == expected and len(shown) == read
        assert stops.reached == (expected != text)
        stopped += stops.reached
    assert 500 < stopped < 2000


def test_a_stop_text_within_a_piece_ends_the_text_before_its_first_occurrence() -> None:
    rng = random.Random(6)
    for _ in range(2000):
        text = "".join(rng.choices("abcd", k=9))
        pieces, stops = pieces_of(text, rng), StopTexts(STOPS)
        shown = stops.feed(pieces, last=True)
        read = "".join(pieces[: len(shown)])
        first = min((start for stop in STOPS if (start := read.find(stop)) >= 0), default=len(read))
        assert "".join(shown) == read[:first]
        assert stops.reached == any(stop in text for stop in STOPS)


@pytest.mark.parametrize("pieces", [["one ", "two", " three"], [], ["", "x"]])
def test_without_stop_texts_every_piece_is_shown_at_once(pieces: list[str]) -> None:
    stops = StopTexts()
    assert stops.feed(pieces) == pieces and not stops.reached


def test_only_a_possible_beginning_is_withheld() -> None:
    stops = StopTexts(["\n\nUser:"])
    assert stops.feed(["Yes.", "\n", "\nUs", "e", "d"]) == ["Yes.", "", "", "", "\n\nUsed"]
    assert stops.feed(["?\n"]) + stops.feed(["\nU"]) + stops.feed([]) + stops.feed(["-"]) == ["?", "", "\n\nU-"]
    assert stops.feed([" \n\nUser", ": more", "lost"]) == [" ", ""] and stops.reached
    assert stops.feed(["later"], last=True) == []
