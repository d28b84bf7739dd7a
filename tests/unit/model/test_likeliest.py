"""The greedy choice against torch's own, and at the edges where the two could differ."""

import math

import pytest
import torch

from kvrelay.model import likeliest as module
from kvrelay.model.likeliest import likeliest


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 16, 31, 48, 1000, 49152])
def test_largest_and_its_place(vocab_size: int) -> None:
    logits_NV = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    largest_N, index_N = likeliest(logits_NV)
    expected = logits_NV.max(-1)
    assert largest_N.tolist() == expected.values.tolist()
    assert index_N.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("places", [(3, 4), (0, 99), (17, 33), (98, 99), (16, 31)])
def test_of_equal_ones_the_first(places: tuple[int, int]) -> None:
    logits_NV = torch.zeros(1, 100)
    logits_NV[0, list(places)] = 2.5
    assert likeliest(logits_NV)[1].tolist() == [places[0]]


@pytest.mark.parametrize("place", [0, 15, 16, 64, 97, 99])
def test_a_nan_is_never_passed_over(place: int) -> None:
    logits_NV = torch.randn(3, 100)
    logits_NV[1, place] = math.nan
    assert likeliest(logits_NV)[0].isnan().tolist() == [False, True, False]


def test_infinities() -> None:
    logits_NV = torch.full((2, 40), -math.inf)
    logits_NV[0, 33] = math.inf
    assert likeliest(logits_NV)[0].tolist() == [math.inf, -math.inf]
    assert likeliest(logits_NV)[1].tolist()[0] == 33


def test_a_view_with_gaps_and_a_machine_without_the_library_are_served_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide_NV = torch.arange(40.0).view(2, 20)
    assert likeliest(wide_NV[:, :7])[1].tolist() == [6, 6]
    monkeypatch.setattr(module, "find_library", lambda: None)
    assert likeliest(wide_NV)[1].tolist() == [19, 19]
