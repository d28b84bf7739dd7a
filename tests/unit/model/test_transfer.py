from __future__ import annotations

import pytest
import torch

from kvrelay.model.transfer import Arrival, on_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, -2, 2**62], torch.int64),
        ((5, 6), torch.int32),
        ([[1, 2, 3], [4, 5, 6]], torch.int32),
        ([], torch.int64),
        ([0.5, -0.25], torch.float32),
        ([0.1], torch.float64),
    ],
)
def test_values_become_a_tensor_of_the_type_asked_for(values: list[int], dtype: torch.dtype) -> None:
    tensor = on_device(values, dtype, CPU)
    assert (tensor.dtype, tensor.device) == (dtype, CPU)
    assert tensor.tolist() == [list(row) if isinstance(row, list) else row for row in values]


def test_values_of_a_cpu_have_arrived() -> None:
    assert Arrival(torch.tensor([[1.0, 2.0]])).wait().tolist() == [[1.0, 2.0]]
    assert Arrival(torch.empty(0, 3)).wait().tolist() == []
