"""Steps on the device: recorded equals eager, and nothing but a step's result makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.sampling import GeneratedToken, SamplingParams
from tests.support.gpu import NEEDS_GPU
from tests.support.tiny_model import make_tiny_model
from tests.support.together import answer_together, sequences_of

pytestmark = NEEDS_GPU

PROMPTS = [tuple(range(3 + index, 20 + 3 * index)) for index in range(11)]
KINDS = [
    SamplingParams(0.0),
    SamplingParams(0.0, logprobs=3),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParams(seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={5: 2.0}, min_tokens=4),
]


def load(directory: Path, dtype: str, max_decode_rows: int) -> LoadedEngine:
    return load_engine(directory, dtype=dtype, num_blocks=256, device="cuda", max_decode_rows=max_decode_rows)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gpu") / "tiny")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 11])
def test_recorded_steps_give_the_tokens_of_eager_ones(model: Path, num_rows: int) -> None:
    eager, recorded = (answer_together(load(model, "float32", rows), PROMPTS[:num_rows], 40) for rows in (0, 11))
    assert recorded == eager


def test_recorded_logits_are_those_of_an_eager_step(model: Path) -> None:
    """In bfloat16, with as many rows as were recorded: the same kernels on the same numbers."""
    engines = [load(model, "bfloat16", rows) for rows in (0, 8)]
    logits = []
    for engine in engines:
        sequences = sequences_of(engine, PROMPTS[:8], 4, SamplingParams(0.0))
        for sequence in sequences:
            engine.runner.run(Batch((ScheduledRow(sequence, sequence.num_tokens - 1),)))
            sequence.num_computed_tokens = sequence.num_tokens - 1
        rows = Batch(tuple(ScheduledRow(sequence, 1) for sequence in sequences))
        step = engine.runner._step_input(_arrays(rows, engine))
        with torch.inference_mode():
            logits.append(engine.runner._decoder.step(step, engine.cache).clone())
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("max_decode_rows", [0, 8], ids=["eager", "recorded"])
@pytest.mark.parametrize("num_tokens", [1, 5], ids=["decode", "prompt"])
def test_a_launch_does_not_wait(model: Path, max_decode_rows: int, num_tokens: int) -> None:
    engine = load(model, "bfloat16", max_decode_rows)
    sequences = sequences_of(engine, PROMPTS[: len(KINDS)], 4, SamplingParams(0.0))
    for sequence, params in zip(sequences, KINDS, strict=True):
        sequence.request = type(sequence.request)(
            sequence.request.request_id, sequence.request.token_ids, sequence.num_prompt_tokens, params
        )
        engine.runner.run(Batch((ScheduledRow(sequence, sequence.num_tokens - num_tokens),)))
        sequence.num_computed_tokens = sequence.num_tokens - num_tokens
    batch = Batch(tuple(ScheduledRow(sequence, num_tokens) for sequence in sequences))
    expected = engine.runner.run(batch)  # once for what is made or loaded at the first time
    with no_waiting():
        in_flight = engine.runner.launch(batch)
    assert in_flight.result() == expected
    assert all(isinstance(token, GeneratedToken) for token in expected)


def test_a_mixed_batch_does_not_wait(model: Path) -> None:
    engine = load(model, "bfloat16", 8)
    first, second = sequences_of(engine, PROMPTS[:2], 4, SamplingParams(0.0))
    engine.runner.run(Batch((ScheduledRow(first, first.num_tokens - 1),)))
    first.num_computed_tokens = first.num_tokens - 1
    batch = Batch((ScheduledRow(first, 1), ScheduledRow(second, 7)))
    expected = engine.runner.run(batch)
    with no_waiting():
        in_flight = engine.runner.launch(batch)
    assert in_flight.result() == expected
    assert expected[1] is None


def test_the_check_itself_can_fail() -> None:
    values = torch.ones(3, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        values.sum().item()


def _arrays(batch: Batch, engine: LoadedEngine) -> object:
    from kvrelay.engine.batch import build

    return build(batch, engine.info.layout.block_tokens)
