"""The greedy choice of each row, for which torch's `max` takes much longer on a CPU than reading the logits does.

Shape letters: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrelay.model.native import find_library


def likeliest(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its index, the first if several are equal; a NaN makes the largest NaN.

    Logits are float32, V at least 1. On CUDA nothing is waited for.
    """
    library = find_library() if logits_NV.device.type == "cpu" else None
    # A tensor of a class of its own may have no memory to read, as those by which torch traces a program.
    readable = type(logits_NV) is Tensor and logits_NV.dtype is torch.float32 and logits_NV.is_contiguous()
    if library is None or not readable:
        largest_N, index_N = logits_NV.max(-1)
        return largest_N, index_N
    num_rows, vocab_size = logits_NV.shape
    largest_N, index_N = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    library.likeliest(logits_NV.data_ptr(), num_rows, vocab_size, largest_N.data_ptr(), index_N.data_ptr())
    return largest_N, index_N
