"""Whatever the logits say, an answer is what it is held to."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import torch

from kvrelay.model.adjust import SamplingRow
from kvrelay.model.masks import bar, without
from kvrelay.model.sampler import Sampler
from kvrelay.sampling import GeneratedToken, SamplingParams, TokenLogprob
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.types import FinishReason
from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.held_answers import ids, random_answers, regex, schema
from tests.support.schemas import random_schema

NUM_SCHEMAS = 200
MINUS_INFINITY = float("-inf")


def test_every_answer_to_two_hundred_random_schemas_parses_and_validates() -> None:
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    answers = random_answers([schema(json.dumps(one)) for one in schemas], temperature=0.0)
    assert {answer.reason for answer in answers} == {FinishReason.STOP}
    for one, answer in zip(schemas, answers, strict=True):
        jsonschema.validate(json.loads(answer.text), one)
    assert len({answer.text for answer in answers}) > NUM_SCHEMAS // 2


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (regex(r"[0-9]{3}-[a-c]+x"), r"[0-9]{3}-[a-c]+x"),
        (StructuredOutput(StructureKind.CHOICE, choices=("yes", "no", "🦙 maybe\n")), r"yes|no|🦙 maybe\n"),
        (StructuredOutput(StructureKind.GRAMMAR, 'start: "a" b\nb: "(" b ")" | "b"'), r"a\(*b\)*"),
        (StructuredOutput(StructureKind.GRAMMAR, 'root ::= "a" b\nb ::= "(" b ")" | [b-d]'), r"a\(*[b-d]\)*"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_every_answer_follows(structured: StructuredOutput, pattern: str) -> None:
    for answer in random_answers([structured] * 20):
        assert answer.reason is FinishReason.STOP
        assert re.fullmatch(pattern, answer.text), answer.text


def test_any_json_object_is_an_object() -> None:
    closing = dict.fromkeys((*ids('"}]'), EOS_TOKEN_ID), 6.0)
    answers = random_answers([StructuredOutput(StructureKind.JSON_OBJECT)] * 10, logit_bias=closing)
    assert {answer.reason for answer in answers} == {FinishReason.STOP}
    assert all(isinstance(json.loads(answer.text), dict) for answer in answers)


def test_an_answer_cut_at_max_tokens_says_so() -> None:
    (answer,) = random_answers([regex("a{20}")], max_tokens=5)
    assert (answer.text, answer.reason) == ("aaaaa", FinishReason.LENGTH)


@pytest.mark.parametrize("how", [{"min_tokens": 8}, {"ignore_eos": True}], ids=["min_tokens", "ignore_eos"])
def test_an_answer_goes_on_for_as_long_as_anything_may_follow(how: dict[str, object]) -> None:
    """Without it the end would come after "a", since its bias is the largest."""
    (plain, longer) = (
        random_answers([regex("a{1,5}")], logit_bias={EOS_TOKEN_ID: 100.0}, **one)[0] for one in ({}, how)
    )
    assert (plain.text, plain.reason) == ("a", FinishReason.STOP)
    assert (longer.text, longer.reason) == ("aaaaa", FinishReason.STOP)


def test_a_bias_cannot_allow_what_may_not_follow_nor_forbid_the_only_one_that_may() -> None:
    [a], [b] = ids("a"), ids("b")
    (answer,) = random_answers([regex("aa")], logit_bias={a: -100.0, b: 100.0})
    assert answer.text == "aa"


@pytest.mark.parametrize("truncation", [{"top_k": 3}, {"top_p": 0.01}, {"min_p": 0.9}, {"repetition_penalty": 9.0}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_truncation_is_among_what_may_follow(temperature: float, truncation: dict[str, float]) -> None:
    answers = random_answers([regex("[ab]{3}z")] * 5, temperature=temperature, **truncation)
    assert all(re.fullmatch("[ab]{3}z", answer.text) for answer in answers)


def test_a_row_without_a_mask_draws_as_it_would_alone() -> None:
    logits = torch.randn(3, 288, generator=torch.Generator().manual_seed(3))
    greedy, drawing = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)
    free = [SamplingRow(params, 4, [5, 6, 7, 8], 4, (2,)) for params in (greedy, drawing)]
    held = SamplingRow(greedy, 4, [5, 6, 7, 8], 4, (2,), mask=bytes([0, 0b100]))
    alone = Sampler().sample(logits[:2], free)
    assert Sampler().sample(logits, [*free, held]) == [*alone, GeneratedToken(10)]


def test_log_probabilities_are_of_the_models_own_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    row = SamplingRow(SamplingParams(temperature=0.0, logprobs=1), 1, [0], 1, (2,), mask=bytes([0b010]))
    (token,) = Sampler().sample(logits, [row])
    assert isinstance(token, GeneratedToken)
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.chosen == TokenLogprob(1, pytest.approx(-1.40761, abs=1e-4))
    assert token.logprobs.top == (TokenLogprob(0, pytest.approx(-0.40761, abs=1e-4)),)


def test_a_mask_bars_what_it_has_no_bit_for() -> None:
    logits = torch.zeros(12)
    bar(logits, bytes([0b10000001]))
    assert logits.tolist() == [0.0, *[MINUS_INFINITY] * 6, 0.0, *[MINUS_INFINITY] * 4]


def test_barred_ends_are_left_where_nothing_else_is() -> None:
    assert without(bytes([0b110]), [1, 99]) == bytes([0b100])
    assert without(bytes([0b110]), [1, 2]) == bytes([0b110])
