"""What Reserve refuses before it looks for blocks."""

import pytest

from decode_node.admission import check_request
from kvrelay.errors import InvalidRequestError, PromptTooLongError
from tests.support.fake_engine import make_info, make_request

INFO = make_info()  # 64 positions, 100 token ids


def check(
    token_ids: tuple[int, ...] = (10, 11, 12), num_tokens: int = 11, num_tokens_now: int = 0, **request: object
) -> None:
    check_request(make_request(token_ids, **request), num_tokens, INFO, num_tokens_now)  # type: ignore[arg-type]


def test_a_request_that_fits_is_taken() -> None:
    check()
    check(tuple(range(60)), num_tokens=64, max_tokens=20)
    check((10, 11, 12), num_tokens=9, num_prompt_tokens=1)
    check(num_tokens_now=4)
    check(num_tokens_now=11)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": (), "num_prompt_tokens": 0}, "token_ids is empty"),
        ({"num_prompt_tokens": 0}, r"num_prompt_tokens is 0; allowed is \[1, 3\]"),
        ({"num_prompt_tokens": 4}, r"num_prompt_tokens is 4; allowed is \[1, 3\]"),
        ({"token_ids": (10, 100)}, r"token_ids holds 100; token ids are in \[0, 100\)"),
        ({"token_ids": (10, -1)}, "token_ids holds -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, r"top_p is 0.0; allowed is \(0, 1\]"),
        ({"max_tokens": None}, "max_tokens and seed must be set"),
        ({"seed": None}, "max_tokens and seed must be set"),
        ({"stop_token_ids": (100,)}, "stop_token_ids holds 100"),
        ({"num_tokens": 10}, "num_tokens is 10; prompt and answer may take 11"),
        ({"num_tokens_now": 3}, r"num_tokens_now is 3; allowed is 0, or \[4, 11\]"),
        ({"num_tokens_now": 12}, r"num_tokens_now is 12; allowed is 0, or \[4, 11\]"),
        ({"num_prompt_tokens": 1, "max_tokens": 2}, "2 of max_tokens 2 are generated; nothing is left to do"),
    ],
)
def test_bad_input_is_named_with_what_is_allowed(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_given", "num_tokens"), [(3, 65), (64, 64)])
def test_what_the_model_cannot_hold_is_too_long(num_given: int, num_tokens: int) -> None:
    with pytest.raises(PromptTooLongError, match="65 tokens of prompt and answer; the model takes 64"):
        check((10,) * num_given, num_tokens=num_tokens)
