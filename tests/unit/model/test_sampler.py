"""Each sampling parameter against numbers worked out by hand.

Distributions are looked at through draws with seeds 0 to n - 1, so every run sees the same draws.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvrelay.errors import BadLogitsError, KVRelayError
from kvrelay.model import draw, sampler
from kvrelay.model.sampler import Sampler, SamplingRow
from kvrelay.model.transfer import Arrival
from kvrelay.sampling import GeneratedToken, SamplingParams

EOS = 4
HALVES = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]


def row(
    *, prompt_ids: Sequence[int] = (), output_ids: Sequence[int] = (), position: int = 7, **params: Any
) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), position, [*prompt_ids, *output_ids], len(prompt_ids), (EOS,))


def sample(logits: Sequence[float], **settings: Any) -> GeneratedToken:
    (token,) = Sampler().sample(torch.tensor([logits]), [row(**settings)])
    assert isinstance(token, GeneratedToken)
    return token


def greedy(logits: Sequence[float], **settings: Any) -> int:
    return sample(logits, temperature=0.0, **settings).token_id


def shares(logits: Sequence[float], num_draws: int = 2000, **settings: Any) -> dict[int, float]:
    """Share of each token among draws with seeds 0 to num_draws - 1."""
    rows = [row(seed=seed, **settings) for seed in range(num_draws)]
    tokens = Sampler().sample(torch.tensor(logits).expand(num_draws, -1), rows)
    counts = Counter(token.token_id for token in tokens if isinstance(token, GeneratedToken))
    return {token: count / num_draws for token, count in counts.items()}


def near(**expected: float) -> Any:
    return pytest.approx({int(token[1:]): share for token, share in expected.items()}, abs=0.03)


def test_no_rows_give_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, 5), []) == []


def test_greedy_takes_the_likeliest_and_the_first_of_equals() -> None:
    assert greedy([1.0, 3.0, 2.0]) == 1
    assert greedy([1.0, 3.0, 3.0]) == 1


def test_draws_follow_the_distribution() -> None:
    assert shares(HALVES) == near(t0=0.5, t1=0.3, t2=0.15, t3=0.05)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.75), (0.5, 0.9), (2.0, 0.634), (0.25, 81 / 82)], ids=str)
def test_temperature_sharpens_and_flattens(temperature: float, expected: float) -> None:
    assert shares([0.0, math.log(3)], temperature=temperature)[1] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-30, 1e-310, 5e-324])
def test_temperatures_next_to_zero_are_greedy(temperature: float) -> None:
    assert shares([5.0, 5.01, -20.0], 50, temperature=temperature) == {1: 1.0}


def test_top_k_keeps_the_likeliest_k() -> None:
    assert shares(HALVES, top_k=2) == near(t0=0.625, t1=0.375)
    assert shares(HALVES, 50, top_k=1) == {0: 1.0}


@pytest.mark.parametrize("top_k", [0, 4, 1000])
def test_top_k_of_zero_or_of_the_vocabulary_keeps_all(top_k: int) -> None:
    assert set(shares(HALVES, top_k=top_k)) == {0, 1, 2, 3}


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    assert set(shares([1.0, 2.0, 1.0, 0.0, 1.0], top_k=2)) == {0, 1, 2, 4}


@pytest.mark.parametrize(
    ("top_p", "expected"), [(1e-6, {0}), (0.45, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (0.99, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, expected: set[int]) -> None:
    assert set(shares(HALVES, top_p=top_p)) == expected


def test_top_p_renormalizes_what_it_keeps() -> None:
    assert shares(HALVES, top_p=0.6) == near(t0=0.625, t1=0.375)


def test_top_p_counts_shares_of_what_top_k_left() -> None:
    """Of 0.4, 0.3 the first has 0.57, which reaches 0.5; of all four it would have 0.4, which does not."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert set(shares(logits, top_k=2, top_p=0.5)) == {0}
    assert set(shares(logits, top_p=0.5)) == {0, 1}


def test_top_p_finds_a_nucleus_of_thousands() -> None:
    """Probabilities fall as exp(-i / 1000) over 5,000 tokens: the first n have 0.9 of all at n = 2,243."""
    drawn = set(shares([-i / 1000 for i in range(5000)], 1000, top_p=0.9))
    assert 2200 < max(drawn) < 2243


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert shares(HALVES, min_p=0.5) == near(t0=0.625, t1=0.375)
    assert set(shares(HALVES, min_p=0.25)) == {0, 1, 2}
    assert shares(HALVES, 50, min_p=1.0) == {0: 1.0}


def test_min_p_looks_at_the_distribution_after_temperature() -> None:
    """At temperature 2 the ratio of the third to the first is sqrt(0.3) = 0.55, at 1 it is 0.3."""
    assert set(shares(HALVES, temperature=2.0, min_p=0.5)) == {0, 1, 2}
    assert set(shares(HALVES, temperature=1.0, min_p=0.5)) == {0, 1}


def test_top_p_counts_shares_of_what_min_p_left() -> None:
    """min_p leaves 0.5 and 0.3; the first has 0.625 of them."""
    assert set(shares(HALVES, min_p=0.5, top_p=0.6)) == {0}
    assert set(shares(HALVES, top_p=0.6)) == {0, 1}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert greedy([2.0, 1.5, 0.0], repetition_penalty=1.5, output_ids=[0]) == 1  # 2 / 1.5 = 1.33
    assert greedy([2.0, 1.3, 0.0], repetition_penalty=1.5, output_ids=[0]) == 0
    assert greedy([-1.0, -1.4, -9.0], repetition_penalty=1.5, output_ids=[0]) == 1  # -1 * 1.5
    assert greedy([-1.0, -1.6, -9.0], repetition_penalty=1.5, output_ids=[0]) == 0


def test_repetition_penalty_counts_prompt_and_output_once() -> None:
    assert greedy([2.0, 1.5, 0.0], repetition_penalty=1.5, prompt_ids=[0, 0]) == 1
    assert greedy([2.0, 1.3, 0.0], repetition_penalty=1.5, prompt_ids=[0], output_ids=[0, 0]) == 0


def test_repetition_penalty_below_one_rewards() -> None:
    assert greedy([2.0, 1.5, 0.0], repetition_penalty=0.5, output_ids=[1]) == 1  # 1.5 / 0.5 = 3


@pytest.mark.parametrize("penalty", [1e-40, 5e-324])
def test_a_vanishing_repetition_penalty_makes_no_nan(penalty: float) -> None:
    assert greedy([2.0, 1.5, 0.0], repetition_penalty=penalty, output_ids=[1]) == 1
    assert sample([2.0, 1.5, 0.0], seed=1, repetition_penalty=penalty, output_ids=[1, 2]).token_id == 1


def test_frequency_penalty_grows_with_the_count_in_the_output() -> None:
    assert greedy([2.0, 1.2], frequency_penalty=0.5, output_ids=[0]) == 0  # 1.5
    assert greedy([2.0, 1.2], frequency_penalty=0.5, output_ids=[0, 0]) == 1  # 1.0
    assert greedy([2.0, 1.2], frequency_penalty=0.5, prompt_ids=[0, 0, 0, 0]) == 0
    assert greedy([2.0, 1.2], frequency_penalty=-0.5, output_ids=[1, 1]) == 1  # 2.2


def test_presence_penalty_does_not_grow() -> None:
    assert greedy([2.0, 1.2], presence_penalty=0.7, output_ids=[0, 0, 0]) == 0  # 1.3
    assert greedy([2.0, 1.2], presence_penalty=0.9, output_ids=[0]) == 1  # 1.1
    assert greedy([2.0, 1.2], presence_penalty=0.9, prompt_ids=[0]) == 0


def test_penalties_shape_draws_too() -> None:
    assert shares(HALVES, presence_penalty=math.log(2), output_ids=[0]) == near(
        t0=1 / 3, t1=0.4, t2=0.2, t3=1 / 15
    )  # 0.25, 0.3, 0.15, 0.05 of 0.75


def test_logit_bias_is_added() -> None:
    assert greedy([2.0, 1.0, 0.0], logit_bias={2: 3.0, 0: -0.5}) == 2
    assert shares(HALVES, logit_bias={1: math.log(2), 0: -100.0}) == near(t1=0.75, t2=0.1875, t3=0.0625)


def test_logit_bias_comes_before_penalties() -> None:
    """(1 + 1) / 2 = 1 loses to 1.2; penalized first it would be 1 / 2 + 1 = 1.5."""
    assert greedy([1.0, 1.2], logit_bias={0: 1.0}, repetition_penalty=2.0, output_ids=[0]) == 1


def test_min_tokens_bars_the_end_until_there_are_enough() -> None:
    logits = [0.0, 1.0, 2.0, 3.0, 4.0]  # 4 is the end of sequence, 3 a stop token
    stops = {"stop_token_ids": (3,), "min_tokens": 2}
    assert greedy(logits, **stops) == 2
    assert greedy(logits, **stops, output_ids=[0]) == 2
    assert greedy(logits, **stops, output_ids=[0, 0]) == 4
    assert set(shares(logits, **stops)) == {0, 1, 2}


def test_min_tokens_lets_an_ignored_end_pass() -> None:
    logits = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert greedy(logits, min_tokens=2, ignore_eos=True) == 4
    assert greedy(logits, min_tokens=2, ignore_eos=True, stop_token_ids=(4,)) == 3


def test_no_logprobs_unless_asked() -> None:
    assert sample(HALVES, temperature=0.0).logprobs is None
    assert sample(HALVES, seed=1).logprobs is None


def test_logprobs_are_of_the_models_own_distribution() -> None:
    token = sample(HALVES, temperature=0.0, logprobs=2, logit_bias={3: 50.0}, repetition_penalty=3.0, prompt_ids=[0])
    assert token.token_id == 3
    assert token.logprobs is not None
    assert token.logprobs.chosen.token_id == 3
    assert token.logprobs.chosen.logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert [top.token_id for top in token.logprobs.top] == [0, 1]
    assert [top.logprob for top in token.logprobs.top] == pytest.approx([math.log(0.5), math.log(0.3)], abs=1e-5)


def test_zero_logprobs_are_of_the_drawn_token_alone() -> None:
    token = sample(HALVES, temperature=0.7, seed=3, logprobs=0)
    assert token.logprobs is not None
    assert token.logprobs.top == ()
    assert token.logprobs.chosen.logprob == pytest.approx(HALVES[token.token_id], abs=1e-5)


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    token = sample(HALVES, temperature=0.0, logprobs=20)
    assert token.logprobs is not None
    assert len(token.logprobs.top) == 4


def test_draws_do_not_depend_on_neighbours_or_order() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(5)) * 3
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 40, "repetition_penalty": 1.3},
        {"temperature": 1.5, "min_p": 0.02, "logprobs": 3},
    ]
    rows = [
        row(seed=index * 31, position=index, prompt_ids=[1, 2], output_ids=[3, index], **kinds[index % 4])
        for index in range(40)
    ]
    alone = [Sampler().sample(logits[index : index + 1], [rows[index]])[0] for index in range(40)]
    order = list(range(40))
    random.Random(2).shuffle(order)
    together = Sampler().sample(logits[order], [rows[index] for index in order])
    assert together == [alone[index] for index in order]
    assert len({token.token_id for token in alone}) > 20


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 40, "repetition_penalty": 1.3, "logprobs": 0},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.01},
    {"temperature": 1.5, "min_p": 0.02, "logprobs": 3},
    {"logit_bias": {5: 4.0, 9: -100.0}, "min_tokens": 3, "stop_token_ids": (7,)},
    {},
]


@pytest.mark.parametrize("at_once", [2, 5, 1000])
def test_rows_drawn_side_by_side_as_a_gpu_does_get_the_tokens_they_get_alone(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    num_rows, generator = 36, torch.Generator().manual_seed(6)
    logits = torch.randn(num_rows, 3000, generator=generator) * torch.linspace(0.2, 4.0, num_rows)[:, None]
    logits[4, 9] = math.nan
    rows = [
        row(seed=index * 7, position=index, prompt_ids=[1, 2], output_ids=[3, index], **KINDS[index % len(KINDS)])
        for index in range(num_rows)
    ]
    alone = [Sampler().sample(logits[index : index + 1], [rows[index]])[0] for index in range(num_rows)]
    monkeypatch.setattr(draw, "rows_at_once", lambda logits_DV: at_once)
    together = Sampler().sample(logits, rows)
    assert isinstance(together[4], BadLogitsError)
    for token, expected in zip(together[:4] + together[5:], alone[:4] + alone[5:], strict=True):
        assert isinstance(token, GeneratedToken)
        assert isinstance(expected, GeneratedToken)
        assert token.token_id == expected.token_id
        if expected.logprobs is None:
            assert token.logprobs is None
        else:
            assert token.logprobs is not None
            assert token.logprobs.chosen.logprob == pytest.approx(expected.logprobs.chosen.logprob, abs=1e-5)
            assert [t.token_id for t in token.logprobs.top] == [t.token_id for t in expected.logprobs.top]


def test_tokens_are_final_though_the_logits_are_overwritten_before_they_are_asked_for() -> None:
    """As the next replay of a CUDA graph does; one row's nucleus is too wide to be found at the first try."""
    logits = torch.stack((torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 3, torch.zeros(5000)))
    rows = [row(seed=3, top_p=0.9, logprobs=1), row(seed=4, top_p=0.9)]
    expected = Sampler().sample(logits, rows)
    pending = Sampler().launch(logits, rows)
    logits.fill_(math.nan)
    assert pending.result() == expected


@pytest.mark.parametrize(("params", "num_copies"), [({"top_p": 0.5}, 1), ({}, 1), ({"top_p": 0.9}, 2)])
def test_only_a_nucleus_beyond_the_likeliest_costs_a_second_copy_to_the_host(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], num_copies: int
) -> None:
    """0.5 of these probabilities lies in some 700 tokens, 0.9 in some 2,200."""
    copies = []
    monkeypatch.setattr(sampler, "Arrival", lambda values: copies.append(values) or Arrival(values))
    Sampler().sample(torch.arange(5000).neg()[None] / 1000.0, [row(seed=1, **params)])
    assert len(copies) == num_copies


def test_a_draw_depends_on_seed_and_on_position() -> None:
    flat = [0.0] * 1000
    drawn = [[sample(flat, seed=seed, position=position).token_id for position in range(20)] for seed in (1, 2)]
    again = [[sample(flat, seed=seed, position=position).token_id for position in range(20)] for seed in (1, 2)]
    assert drawn == again
    assert len(set(drawn[0] + drawn[1])) > 35


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5}])
def test_a_row_with_bad_logits_gets_an_error_and_the_others_their_tokens(bad: float, params: dict[str, Any]) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    tokens = Sampler().sample(logits, [row(**params)] * 3)
    error = tokens[1]
    assert isinstance(error, BadLogitsError)
    assert error.message == "the model gave NaN or infinite logits for the token at position 7"
    (alone,) = Sampler().sample(torch.zeros(1, 5), [row(**params)])
    assert [tokens[0], tokens[2]] == [alone, alone]


def test_logits_that_are_minus_infinity_are_never_drawn() -> None:
    assert set(shares([0.0, -math.inf, 0.0], top_p=0.99)) == {0, 2}


def test_logits_stay_as_they_are() -> None:
    logits = torch.tensor([HALVES])
    settings = {"logit_bias": {0: 1.0}, "repetition_penalty": 2.0, "top_k": 2, "min_tokens": 1, "stop_token_ids": (1,)}
    Sampler().sample(logits, [SamplingRow(SamplingParams(seed=1, **settings), 3, [0], 1, ())])
    assert torch.equal(logits, torch.tensor([HALVES]))


def test_a_draw_without_a_seed_is_refused() -> None:
    with pytest.raises(KVRelayError, match="a draw needs a seed"):
        sample(HALVES)
