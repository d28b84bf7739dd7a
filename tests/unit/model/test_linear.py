from __future__ import annotations

import pytest
import torch

from kvrelay.model.linear import PlainLinear, make_linear


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 16, 100])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-4), ("bfloat16", 0.2), ("float16", 0.05)])
def test_the_fastest_form_computes_what_the_plain_one_does(dtype: str, atol: float, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 80, generator=generator).to(getattr(torch, dtype))
    x = torch.randn(num_rows, 80, generator=generator).to(getattr(torch, dtype))
    y = make_linear(weight)(x)
    assert y.dtype == weight.dtype
    assert y.shape == (num_rows, 96)
    torch.testing.assert_close(y, PlainLinear(weight)(x), rtol=0.01, atol=atol)


def test_without_the_private_operators_the_plain_form_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.model.linear._PACKING_OPERATORS", ("_no_such_operator",))
    assert isinstance(make_linear(torch.eye(4)), PlainLinear)
