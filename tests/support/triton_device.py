"""Where Triton kernels are tested: on the GPU if there is one, else on the CPU by Triton's interpreter.

Import this before any module with kernels: a kernel is interpreted or not from the moment it is defined.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")
