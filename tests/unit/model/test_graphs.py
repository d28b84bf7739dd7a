"""Recorded decode steps. On a CPU a recording is the function itself: it reads what lies in its tensors when replayed,
as a CUDA graph does, so that inputs, filling rows and logits are tested here; the graphs themselves in tests/gpu.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model import graphs
from kvrelay.model.decoder import Decoder
from kvrelay.model.graphs import GraphedDecoder, batch_buckets, with_graphs
from kvrelay.model.weights import load_decoder
from tests.support.dense_attention import DenseAttention
from tests.support.steps import Row, step_input
from tests.support.tiny_model import make_tiny_model

NUM_BLOCKS = 24


class Recorder:
    """Notes the order in which steps were recorded, runs them once as a warm-up, and counts the replays."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []

    def __call__(self, queue_step: Callable[[], None]) -> Callable[[], None]:
        queue_step()
        index, self.num_recorded = self.num_recorded, self.num_recorded + 1

        def replay() -> None:
            self.replayed.append(index)
            queue_step()

        return replay


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    model = make_tiny_model(tmp_path_factory.mktemp("graphs") / "tiny", max_model_len=64)
    decoder = load_decoder(model, dtype="float32")[1]
    decoder.attention = DenseAttention()
    return decoder


def new_cache(decoder: Decoder) -> PagedKVCache:
    cache = PagedKVCache(decoder.config.layout("float32", 4), NUM_BLOCKS)
    cache.tensor.normal_(generator=torch.Generator().manual_seed(4))
    return cache


def make(decoder: Decoder, cache: PagedKVCache, max_rows: int) -> tuple[GraphedDecoder, Recorder]:
    recorder, attention = Recorder(), decoder.attention
    assert isinstance(attention, DenseAttention)
    return GraphedDecoder(decoder, attention, cache, max_rows, recorder), recorder


def decode_rows(*earlier: int) -> list[tuple[Row, int]]:
    """Rows that have so many tokens already and compute one more; each with blocks of its own, from block 1 on."""
    free = iter(range(1, NUM_BLOCKS))
    return [
        (Row([index + 3] * (count + 1), [next(free) for _ in range(count // 4 + 1)], num_done=count), 1)
        for index, count in enumerate(earlier)
    ]


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (16, [1, 2, 4, 8, 16]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
        (64, [1, 2, 4, 8, 16, 32, 48, 64]),
    ],
)
def test_batch_sizes_that_are_recorded(max_rows: int, expected: list[int]) -> None:
    assert batch_buckets(max_rows) == expected


def test_a_recorded_step_gives_the_decoders_logits_and_kv(decoder: Decoder) -> None:
    plain, graphed_cache = new_cache(decoder), new_cache(decoder)
    graphed, recorder = make(decoder, graphed_cache, 8)
    graphed_cache.tensor.copy_(plain.tensor)
    assert recorder.num_recorded == 4
    # sizes 8, 4, 2, 1 are recorded in this order
    for earlier, replayed in [((9, 3, 17), 1), ((0, 5, 12, 7, 1), 0), ((6,), 3), ((2, 2), 2), ((30, 4, 4), 1)]:
        inp = step_input(decode_rows(*earlier), 4)
        expected = decoder.step(inp, plain)
        torch.testing.assert_close(graphed.step(inp, graphed_cache), expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(graphed_cache.tensor, plain.tensor, rtol=0, atol=2e-5)
        assert recorder.replayed[-1] == replayed


def test_recording_and_filling_rows_touch_no_block_of_the_pool(decoder: Decoder) -> None:
    cache = new_cache(decoder)
    before = cache.tensor.clone()
    graphed, _ = make(decoder, cache, 8)
    assert torch.equal(cache.tensor, before)
    graphed.step(step_input(decode_rows(4, 9, 14, 3, 3), 4), cache)
    after_five = cache.tensor.clone()
    cache.tensor[3:] = before[3:]  # the blocks of rows that the next step has no more
    graphed.step(step_input(decode_rows(4), 4), cache)
    assert torch.equal(cache.tensor[3:], before[3:])
    torch.testing.assert_close(cache.tensor[:3], after_five[:3], rtol=0, atol=2e-5)


def test_only_wanted_rows_get_logits(decoder: Decoder) -> None:
    cache = new_cache(decoder)
    graphed, _ = make(decoder, cache, 4)
    inp = step_input(decode_rows(5, 6, 7), 4)
    every = graphed.step(inp, cache).clone()
    some = graphed.step(replace(inp, logit_rows_N=torch.tensor([2])), cache)
    torch.testing.assert_close(some, every[[2]])


def test_prompts_and_larger_batches_are_not_replayed(decoder: Decoder) -> None:
    plain, cache = new_cache(decoder), new_cache(decoder)
    graphed, recorder = make(decoder, cache, 2)
    for rows in ([(Row([5] * 7, [1, 2]), 7)], decode_rows(1, 2, 3)):
        inp = step_input(rows, 4)
        torch.testing.assert_close(graphed.step(inp, cache), decoder.step(inp, plain), rtol=0, atol=2e-5)
    assert recorder.replayed == []


def test_nan_of_an_earlier_owner_is_cleared_before_a_replay(decoder: Decoder) -> None:
    """The attention here reads whole blocks; see AttentionBackend."""
    cache = new_cache(decoder)
    graphed, _ = make(decoder, cache, 1)
    rows = decode_rows(8)  # its token begins block 3
    cache.tensor[3] = torch.nan
    assert graphed.step(step_input(rows, 4), cache).isfinite().all()


def test_no_device_no_recording(decoder: Decoder) -> None:
    assert with_graphs(decoder, new_cache(decoder), 8) is decoder


def test_attention_that_cannot_be_recorded_is_said_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = load_decoder(make_tiny_model(tmp_path), dtype="float32")[1]

    class OnDevice:
        tensor = type("Tensor", (), {"is_cuda": True})

    assert with_graphs(decoder, OnDevice(), 8) is decoder  # type: ignore[arg-type]
    assert "decode steps are not recorded: attention plain cannot be" in caplog.text
    assert logging.WARNING in {record.levelno for record in caplog.records}
    assert graphs.with_graphs(decoder, OnDevice(), 0) is decoder  # type: ignore[arg-type]
