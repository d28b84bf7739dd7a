from __future__ import annotations

import math

import pytest
import torch

from kvrelay.model.config import RopeScaling
from kvrelay.model.rotary import inverse_frequencies, rotate


def test_frequencies_fall_by_powers_of_theta() -> None:
    assert inverse_frequencies(8, 10_000.0, None).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_linear_scaling_divides_every_frequency() -> None:
    scaling = RopeScaling("linear", 4.0)
    assert inverse_frequencies(4, 100.0, scaling).tolist() == pytest.approx([0.25, 0.025])


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    """Of 8,192 positions: wavelengths under 8192 / 4 stay, above 8192 / 1 are divided by 8.

    0.001 has wavelength 6283, so (8192 / 6283.19 - 1) / 3 = 0.1013 of it stays: 0.001 * (0.1013 + 0.8987 / 8).
    """
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    expected = [1.0, 0.1, 0.01, 0.000213601]
    assert inverse_frequencies(8, 10_000.0, scaling).tolist() == pytest.approx(expected, rel=1e-4)
    assert inverse_frequencies(2, 10_000.0, RopeScaling("llama3", 8.0, 1.0, 4.0, 4)).tolist() == [0.125]


def test_a_quarter_turn_swaps_the_halves_with_one_sign() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quarter = math.pi / 2
    cos = torch.tensor([[[math.cos(quarter)] * 2 * 2]])
    sin = torch.tensor([[[-math.sin(quarter)] * 2 + [math.sin(quarter)] * 2]])
    assert rotate(x, cos, sin)[0, 0].tolist() == pytest.approx([-3.0, -4.0, 1.0, 2.0], abs=1e-6)
    assert x[0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
