"""A step asks the device for no number: with tensors that have no contents, whatever would read one raises.

On a GPU that is what makes the host wait; tests/gpu holds the same with torch's own check.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model import adjust, attention_plain, draw, sampler, transfer
from kvrelay.model.decoder import Decoder
from kvrelay.model.sampler import Sampler, SamplingRow
from kvrelay.model.weights import load_decoder
from kvrelay.sampling import SamplingParams
from tests.support.steps import Row, step_input
from tests.support.tiny_model import make_tiny_model

USERS_OF_ON_DEVICE: tuple[ModuleType, ...] = (adjust, attention_plain, draw, sampler)
STEP_TENSORS = ("token_ids_T", "positions_T", "slot_mapping_T", "block_table_RB", "logit_rows_N")
KINDS = [
    SamplingParams(0.0),
    SamplingParams(0.0, logprobs=3),
    SamplingParams(0.0, presence_penalty=0.5),
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParams(seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={5: 2.0}, min_tokens=4),
]


@contextmanager
def empty_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Tensors made in here have shapes and no contents, those that come from the host too."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in USERS_OF_ON_DEVICE:
            monkeypatch.setattr(module, "on_device", lambda *args: mode.from_tensor(transfer.on_device(*args)))
        monkeypatch.setattr(sampler, "Arrival", lambda values: values)
        yield mode


def test_draws_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [SamplingRow(params, 7, [1, 2, 3], 2, (0,)) for params in KINDS]
    monkeypatch.setattr(draw, "rows_at_once", lambda logits_DV: 2)
    with empty_tensors(monkeypatch):
        table: Any = Sampler().launch(torch.empty(len(rows), 3000), rows)._table_NW
    assert table.shape == (len(rows), 3 + 1 + 2 * 3)
    assert table.dtype == torch.float64


def test_a_step_of_the_decoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, decoder = load_decoder(make_tiny_model(tmp_path), dtype="float32", decoder="torch")
    assert isinstance(decoder, Decoder)
    cache = PagedKVCache(decoder.config.layout("float32", 4), 20)
    rows = [(Row([1] * 9, [1, 2, 3], num_done=8), 1), (Row([2] * 3, [4], num_done=2), 1), (Row([3] * 6, [5, 6]), 6)]
    inp = step_input(rows, 4)
    with empty_tensors(monkeypatch) as mode:
        emptied = {name: mode.from_tensor(getattr(inp, name)) for name in STEP_TENSORS}
        logits: Tensor = decoder.step(replace(inp, **emptied), cache)
    assert logits.shape == (8, decoder.config.vocab_size)


def test_asking_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with empty_tensors(monkeypatch), pytest.raises(DataDependentOutputException):
        torch.empty(3).sum().item()
