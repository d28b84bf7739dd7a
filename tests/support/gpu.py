"""The mark of tests that need a CUDA device."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]
