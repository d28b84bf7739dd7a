"""How long a prompt may be, by tenant and by model."""

from __future__ import annotations

import pytest

from coordinator.prompt_limits import PromptLimits, check_prompt, parse_tokens_by_model
from kvrelay.errors import ConfigError, PromptTooLongError

NO_LIMITS = PromptLimits()


def test_a_prompt_within_every_bound_is_taken() -> None:
    check_prompt(10**6, "small", "a", NO_LIMITS, NO_LIMITS)
    check_prompt(90, "small", "a", PromptLimits(90), PromptLimits(100))
    check_prompt(90, "small", "a", PromptLimits(0, {"small": 90}), PromptLimits(9, {"small": 100, "large": 8}))


def test_no_bound_of_a_model_stands_in_for_the_one_of_any() -> None:
    check_prompt(91, "small", "a", PromptLimits(90, {"small": 0}), NO_LIMITS)


@pytest.mark.parametrize(
    ("tenants", "ours", "whose"),
    [
        (PromptLimits(90), PromptLimits(100), "tenant 'a' may send 90"),
        (NO_LIMITS, PromptLimits(90), "this coordinator takes 90"),
        (PromptLimits(900, {"small": 90}), NO_LIMITS, "tenant 'a' may send 90 for model 'small'"),
        (PromptLimits(0, {"large": 9}), PromptLimits(0, {"small": 90}), "this coordinator takes 90 for model 'small'"),
    ],
)
def test_a_longer_one_is_told_its_length_and_whose_bound_it_is(
    tenants: PromptLimits, ours: PromptLimits, whose: str
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        check_prompt(91, "small", "a", tenants, ours)
    assert caught.value.message == f"the prompt has 91 tokens; {whose}"


def test_bounds_are_written_as_names_and_tokens() -> None:
    assert parse_tokens_by_model("") == {}
    assert parse_tokens_by_model(" small = 900;\nllama3:8b=0 ;") == {"small": 900, "llama3:8b": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("small", "'small' is no bound; allowed is a model's name, = and a whole number of tokens"),
        ("small=", "'small=' is no bound"),
        ("=5", "'=5' is no bound"),
        ("small=-5", "'small=-5' is no bound"),
        ("small=1;small=2", "'small' is named twice"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tokens_by_model(text)
    assert message in caught.value.message
