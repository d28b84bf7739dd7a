"""The detokenizer returns only what never has to be taken back, and all of it in the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.detokenizer import Detokenizer

TRICKY = [
    "🚀",
    "👩‍💻",
    "👨🏽‍🚀",
    "한국어",
    "각",
    "é",
    "e\u0301",
    "🇵🇹🇫🇷",
    "नमस्ते",
    "☕️",
    "a",
    " ",
    "\n",
    "ż",
    "\U0010ffff",
]
texts = st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=4)), max_size=12).map("".join)


class Pieces:
    """A vocabulary in which token n is the n-th piece."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def run(pieces: Sequence[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str, str | None]:
    """What each push returned, what flush returned, and the stop string that ended it."""
    detokenizer = Detokenizer(Pieces(pieces), stop)
    parts = [detokenizer.push(index) for index in range(len(pieces))]
    return parts, detokenizer.flush(), detokenizer.stopped


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces, characters cut anywhere, empty pieces (special tokens) among them."""
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


def cut_at_first_stop(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Character by character: the stop string that completes first, the longest of those that do together."""
    for end in range(1, len(text) + 1):
        complete = [entry for entry in stop if text[:end].endswith(entry)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.data(), texts)
def test_valid_text_comes_back_whole_and_never_holds_a_replacement_character(data: st.DataObject, text: str) -> None:
    text = text.replace("\ufffd", "?")
    parts, rest, _ = run(data.draw(cut(text.encode("utf-8"))))
    assert "".join(parts) == text
    assert rest == ""


@given(st.data(), texts)
def test_every_whole_character_is_returned_at_once(data: st.DataObject, text: str) -> None:
    pieces = data.draw(cut(text.encode("utf-8")))
    parts, _, _ = run(pieces)
    for count in range(1, len(pieces) + 1):
        assert "".join(parts[:count]) == b"".join(pieces[:count]).decode("utf-8", "ignore")


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_any_bytes_come_out_as_their_decode_as_a_whole(pieces: list[bytes]) -> None:
    parts, rest, _ = run(pieces)
    assert "".join(parts) + rest == b"".join(pieces).decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("pieces", "parts", "rest"),
    [
        ([b"ab\xf0\x9f", b"\x9a\x80c"], ["ab", "🚀c"], ""),
        ([b"ab\xf0\x9f", b"c"], ["ab", "\ufffdc"], ""),  # truly invalid: known as soon as the next byte is
        ([b"ab\xf0\x9f\x9a"], ["ab"], "\ufffd"),  # one for the unfinished character
        ([b"\xed\x95", b"", b"\x9c"], ["", "", "한"], ""),  # a special token in the middle changes nothing
        ([b"\xff", b"\xc3"], ["\ufffd", ""], "\ufffd"),
        ([], [], ""),
    ],
)
def test_unfinished_characters_wait(pieces: list[bytes], parts: list[str], rest: str) -> None:
    assert run(pieces) == (parts, rest, None)


@pytest.mark.parametrize(
    ("pieces", "stop", "parts", "rest", "stopped"),
    [
        # across tokens: nothing of it leaks
        ([b"one ST", b"O", b"P two"], ("STOP",), ["one ", "", ""], "", "STOP"),
        # a near miss is released as soon as it is one
        ([b"one ST", b"O", b"RM"], ("STOP",), ["one ", "", "STORM"], "", None),
        # text that may start again inside the near miss
        ([b"aab", b"aab", b"c"], ("aabc",), ["", "aab", ""], "", "aabc"),
        # at the end held text is released
        ([b"one ST"], ("STOP",), ["one "], "ST", None),
        # one a prefix of the other: the shorter completes first
        ([b"x</", b"s>", b"</s>>"], ("</s>>", "</s>"), ["x", "", ""], "", "</s>"),
        # one a suffix of the other: they complete together, the longer one is cut
        ([b"x\n\nUser:", b"y"], ("User:", "\n\nUser:"), ["x", ""], "", "\n\nUser:"),
        # one inside the other: the inner one completes first
        ([b"abcd"], ("abcd", "bc"), ["a"], "", "bc"),
        # in the middle of a token, text after it dropped
        ([b"yes. no. yes"], (".",), ["yes"], "", "."),
        # a stop string of one emoji whose bytes come one by one
        ([b"go \xf0", b"\x9f", b"\x9a", b"\x80!"], ("🚀",), ["go ", "", "", ""], "", "🚀"),
        # tokens after the stop add nothing, nor does an unfinished character
        ([b"a.", b"b", b"\xf0\x9f"], (".",), ["a", "", ""], "", "."),
        # the bytes that complete a held stop are invalid: released, then replaced
        ([b"xS", b"\xff"], ("STOP",), ["x", "S\ufffd"], "", None),
    ],
)
def test_stop_strings(
    pieces: list[bytes], stop: tuple[str, ...], parts: list[str], rest: str, stopped: str | None
) -> None:
    assert run(pieces, stop) == (parts, rest, stopped)


few_letters = st.text(alphabet="ab🚀", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab🚀", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


@given(st.data(), few_letters, stop_lists)
def test_the_text_is_cut_at_the_first_stop_wherever_tokens_end(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    parts, rest, stopped = run(data.draw(cut(text.encode("utf-8"))), stop)
    assert ("".join(parts) + rest, stopped) == cut_at_first_stop(text, stop)


@given(st.data(), few_letters, stop_lists)
def test_what_is_held_is_the_longest_possible_start_of_a_stop_and_no_more(
    data: st.DataObject, text: str, stop: tuple[str, ...]
) -> None:
    pieces = data.draw(cut(text.encode("utf-8")))
    parts, _, _ = run(pieces, stop)
    for count in range(1, len(pieces) + 1):
        known = b"".join(pieces[:count]).decode("utf-8", "ignore")
        certain, stopped = cut_at_first_stop(known, stop)
        starts = {entry[:size] for entry in stop for size in range(1, len(entry))} if stopped is None else set()
        num_held = max((len(start) for start in starts if certain.endswith(start)), default=0)
        assert "".join(parts[:count]) == certain[: len(certain) - num_held]


def test_tokens_before_min_tokens_are_no_part_of_a_stop() -> None:
    detokenizer = Detokenizer(Pieces([b"a.", b"b", b"S", b"TOP", b"STOP"]), (".", "STOP"))
    parts = [detokenizer.push(index, may_stop=index > 2) for index in range(5)]
    assert parts == ["a.", "b", "S", "TOP", ""]
    assert detokenizer.stopped == "STOP"
