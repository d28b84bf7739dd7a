"""What a decode node measures of its steps."""

from __future__ import annotations

import pytest

from decode_node.rates import DecodeRates
from kvrelay.cluster import NodeRates


def test_nothing_is_known_before_a_step() -> None:
    rates = DecodeRates(slab_bytes=1_000)
    rates.stepped(0, 0, 0.001)  # nobody could run
    assert rates.rates() == NodeRates()


def test_steps_of_sequences_alone_give_the_time_of_a_step() -> None:
    rates = DecodeRates(slab_bytes=1_000)
    for rows in (1, 8) * 30:
        rates.stepped(rows, rows, 0.02 + 0.001 * rows)
    known = rates.rates()
    assert known.step_s == pytest.approx(0.02, rel=0.03)
    assert known.step_row_s == pytest.approx(0.001, rel=0.05)
    assert known.prefill_tokens_per_s == 0.0


def test_a_prompt_takes_what_its_step_takes_beyond_the_others() -> None:
    """Four sequences take 20 ms; with 100 tokens of a fifth's prompt beside them a step takes 70 ms."""
    rates = DecodeRates(slab_bytes=1_000)
    for _ in range(30):
        rates.stepped(4, 4, 0.02)
    rates.stepped(4, 104, 0.07)
    assert rates.rates().prefill_tokens_per_s == pytest.approx(2_000, rel=0.01)
    assert rates.rates().step_s == pytest.approx(0.02, rel=0.01)


def test_a_prompt_that_seems_to_take_no_time_is_taken_to_take_a_tenth_of_its_step() -> None:
    rates = DecodeRates(slab_bytes=1_000)
    for _ in range(30):
        rates.stepped(4, 4, 0.02)
    rates.stepped(4, 104, 0.02)
    assert rates.rates().prefill_tokens_per_s == pytest.approx(50_000)


def test_blocks_from_stores_are_counted_in_bytes() -> None:
    rates = DecodeRates(slab_bytes=1_000)
    rates.loaded(0, 1.0)  # a wait for nothing is no rate
    rates.loaded(8, 0.5)
    assert rates.rates().store_bytes_per_s == 16_000
