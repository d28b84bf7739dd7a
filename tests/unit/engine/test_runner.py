"""The runner and the loader, with a tiny real model."""

import logging
from pathlib import Path

import pytest
import torch

from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, ConfigError
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockHash, BlockId
from tests.support.fake_engine import make_request
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    model = make_tiny_model(tmp_path_factory.mktemp("runner") / "tiny")
    return load_engine(model, dtype="float32", num_blocks=16, block_tokens=4, threads=1)


def make_sequence(token_ids: tuple[int, ...], table: list[int]) -> Sequence:
    sequence = Sequence.create(make_request(token_ids, max_tokens=20), BlockHash(bytes(32)), 4)
    sequence.block_table = [BlockId(i) for i in table]
    return sequence


def advance(engine: LoadedEngine, *rows: tuple[Sequence, int]) -> list[int | None]:
    tokens = engine.runner.run(Batch(tuple(ScheduledRow(*row) for row in rows)))
    for (sequence, count), token in zip(rows, tokens, strict=True):
        sequence.num_computed_tokens += count
        if isinstance(token, GeneratedToken):
            sequence.append(token.token_id)
    return [token.token_id if isinstance(token, GeneratedToken) else None for token in tokens]


def test_chunks_and_company_do_not_change_the_tokens(engine: LoadedEngine) -> None:
    prompt = tuple(range(20, 31))
    alone = make_sequence(prompt, [0, 1, 2, 3, 4])
    expected = [advance(engine, (alone, alone.num_uncomputed))[0] for _ in range(5)]
    chunked, other = make_sequence(prompt, [9, 7, 5, 6, 8]), make_sequence((40, 41, 42), [10, 11, 12, 13])
    assert advance(engine, (chunked, 5), (other, 2)) == [None, None]
    drawn, others = advance(engine, (chunked, 6), (other, 1))
    assert others is not None
    assert [drawn] + [advance(engine, (other, 1), (chunked, 1))[1] for _ in range(4)] == expected


def test_a_row_that_draws_nothing_among_others_gets_none(engine: LoadedEngine) -> None:
    first, second = make_sequence((20, 21, 22), [0]), make_sequence((30, 31), [1])
    tokens = advance(engine, (first, 2), (second, 2))
    assert tokens[0] is None
    assert tokens[1] is not None


def test_a_row_of_nans_spoils_no_other(engine: LoadedEngine) -> None:
    good, alone, bad = (make_sequence((20, 21, 22), [block]) for block in (2, 3, 4))
    advance(engine, (good, 2), (alone, 2), (bad, 2))
    engine.cache.tensor[4, :, :, :2] = float("nan")
    (expected,) = advance(engine, (alone, 1))
    row = (ScheduledRow(bad, 1), ScheduledRow(good, 1))
    error, token = engine.runner.run(Batch(row))
    assert isinstance(error, BadLogitsError)
    assert error.message == "the model gave NaN or infinite logits for the token at position 3"
    assert token == GeneratedToken(expected)


def test_a_step_in_flight_gives_what_run_gives(engine: LoadedEngine) -> None:
    first, second, again = (make_sequence((20, 21, 22), [block]) for block in (5, 6, 7))
    (expected,) = advance(engine, (again, 3))
    in_flight = engine.runner.launch(Batch((ScheduledRow(first, 2), ScheduledRow(second, 3))))
    assert in_flight.result() == [None, GeneratedToken(expected)]
    (nothing,) = engine.runner.launch(Batch((ScheduledRow(make_sequence((1, 2), [8]), 1),))).result()
    assert nothing is None


def test_the_loader_says_what_it_serves(engine: LoadedEngine) -> None:
    info = engine.info
    assert (info.name, info.architecture, info.max_model_len, info.vocab_size) == ("tiny", "llama", 1024, 288)
    assert info.attention_backend == "torch-plain"  # no recording without a GPU
    assert (info.eos_token_ids, info.dtype, info.layout.block_tokens) == ((2,), "float32", 4)
    assert len(info.fingerprint) == 64
    assert engine.pool.num_blocks == engine.cache.num_blocks == 16


def test_kv_bytes_become_blocks_and_the_log_says_sizes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    caplog.set_level(logging.INFO)
    # 2 layers, K and V, 16 tokens, 2 heads of 16, 4 bytes: 8,192 bytes a block
    loaded = load_engine(model, name="mine", dtype="float32", kv_bytes=100_000, threads=1)
    assert loaded.pool.num_blocks == 12
    assert "serving mine (float32, torch-plain)" in caplog.text
    assert "12 blocks of 16 tokens" in caplog.text
    with pytest.raises(ConfigError, match="kv_bytes is 8191, less than one block of 8192 bytes"):
        load_engine(model, dtype="float32", kv_bytes=8191, threads=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_and_auto_takes_the_cpu(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match="device is cuda, and torch finds no GPU"):
        load_engine(model, device="cuda", num_blocks=4, threads=1)
    assert load_engine(model, device="auto", num_blocks=4, threads=1).cache.tensor.device.type == "cpu"
