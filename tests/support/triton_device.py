"""Where Triton kernels are tested: on the GPU if there is one, else on the CPU by Triton's interpreter.

tests/conftest.py has chosen, before anything could import triton.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("there is a GPU, but this torch cannot use it", allow_module_level=True)

# Only now: these import triton.
from kvrelay.model.attention_triton import TritonPagedAttention as TritonPagedAttention  # noqa: E402
from kvrelay.model.pointwise_triton import TritonPointwise as TritonPointwise  # noqa: E402
