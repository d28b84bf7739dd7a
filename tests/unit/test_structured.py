"""What a request may hold its answer to is bounded before anything is compiled."""

from __future__ import annotations

import pytest

from kvrelay.errors import InvalidRequestError
from kvrelay.sampling import SamplingParams
from kvrelay.structured import StructuredOutput, StructureKind


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(StructureKind.JSON_OBJECT),
        StructuredOutput(StructureKind.JSON_SCHEMA, "{}"),
        StructuredOutput(StructureKind.REGEX, "x" * 16_384),
        StructuredOutput(StructureKind.GRAMMAR, 'start: "ü"'),
        StructuredOutput(StructureKind.CHOICE, choices=("x",) * 1024),
    ],
    ids=lambda structured: structured.kind,
)
def test_what_is_allowed(structured: StructuredOutput) -> None:
    SamplingParams(structured=structured).validate(vocab_size=10)


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (StructuredOutput(StructureKind.REGEX), "regex is empty"),
        (StructuredOutput(StructureKind.JSON_SCHEMA, "ü" * 65_537), "json_schema has 131074 bytes; at most 131072"),
        (
            StructuredOutput(StructureKind.GRAMMAR, "\ud800"),
            "grammar is not valid Unicode: surrogates not allowed",
        ),
        (StructuredOutput(StructureKind.REGEX, "x" * 16_385), "regex has 16385 bytes; at most 16384 are allowed"),
        (StructuredOutput(StructureKind.GRAMMAR, "x" * 32_769), "grammar has 32769 bytes; at most 32768 are allowed"),
        (StructuredOutput(StructureKind.CHOICE), r"choice has 0 entries; allowed is \[1, 1024\]"),
        (StructuredOutput(StructureKind.CHOICE, choices=("x",) * 1025), "choice has 1025 entries"),
        (StructuredOutput(StructureKind.CHOICE, choices=("x", "")), "choice holds an empty string"),
        (StructuredOutput(StructureKind.CHOICE, choices=("x" * 70_000,) * 2), "choice has 140000 bytes"),
        (StructuredOutput(StructureKind.CHOICE, "x", ("x",)), "of kind choice takes no text"),
        (StructuredOutput(StructureKind.JSON_OBJECT, "{}"), "of kind json_object takes no text"),
        (StructuredOutput(StructureKind.REGEX, "x", ("x",)), "of kind regex takes no choices"),
    ],
)
def test_what_is_refused(structured: StructuredOutput, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(structured=structured).validate(vocab_size=10)


HELD = StructuredOutput(StructureKind.REGEX, "a+")
EOS, STOP = 2, 9


@pytest.mark.parametrize(
    ("sampling", "token_id", "num_tokens", "ends"),
    [
        (SamplingParams(min_tokens=3), EOS, 2, False),
        (SamplingParams(min_tokens=3), EOS, 3, True),
        (SamplingParams(ignore_eos=True), EOS, 3, False),
        (SamplingParams(structured=HELD, min_tokens=3), EOS, 2, True),
        (SamplingParams(structured=HELD, ignore_eos=True), EOS, 2, True),
        (SamplingParams(structured=HELD, stop_token_ids=(STOP,), min_tokens=3), STOP, 2, False),
        (SamplingParams(structured=HELD, stop_token_ids=(STOP,), min_tokens=3), STOP, 3, True),
        (SamplingParams(structured=HELD), STOP, 3, False),
    ],
)
def test_what_ends_an_answer(sampling: SamplingParams, token_id: int, num_tokens: int, ends: bool) -> None:
    """Held to something, it is given an end only where nothing else may follow, so that is the end of it."""
    assert sampling.ends_answer(token_id, num_tokens, (EOS,)) is ends
