"""Attention kernels on the device, in bfloat16 and at lengths where parts are merged, against float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvrelay.kv.cache import DTYPES, PagedKVCache
from kvrelay.model.attention import AttentionBackend, BackendUnavailable
from kvrelay.model.attention_plain import PlainPagedAttention
from kvrelay.model.config import ModelConfig
from kvrelay.model.step import StepInput
from tests.support.gpu import NEEDS_GPU
from tests.support.paged import make_config, random_cache, random_queries, random_rows

pytestmark = NEEDS_GPU

ROWS = [(5000, 1), (0, 1), (127, 1), (1023, 1), (0, 300), (513, 200)]
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}


def backend(name: str, config: ModelConfig, dtype: str) -> AttentionBackend:
    if name == "varlen":
        from kvrelay.model.attention_varlen import VarlenPagedAttention

        try:
            return VarlenPagedAttention.probed("cuda", config, DTYPES[dtype])
        except BackendUnavailable as reason:
            pytest.skip(str(reason))
    if name == "triton":
        pytest.importorskip("triton")
        from kvrelay.model.attention_triton import TritonPagedAttention

        return TritonPagedAttention(config)
    return PlainPagedAttention()


def reference(q_THD: Tensor, inp: StepInput, cache: PagedKVCache) -> Tensor:
    """Softmax over what each token may see, in float64."""
    group, outputs = q_THD.shape[1] // cache.layout.num_kv_heads, []
    for row, context_len in enumerate(inp.context_lens):
        blocks = inp.block_table_RB[row, : cache.layout.blocks_for(context_len)].long()
        keys, values = (
            each[blocks].flatten(0, 1)[:context_len].double().repeat_interleave(group, 1)
            for each in (cache.keys(1), cache.values(1))
        )
        queries = q_THD[inp.tokens_of(row)].double()
        scores = torch.einsum("thd,shd->hts", queries, keys) * q_THD.shape[-1] ** -0.5
        earlier = context_len - len(queries)
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(earlier + 1)
        outputs.append(torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (8, 8, 80)])
@pytest.mark.parametrize("name", ["plain", "triton", "varlen"])
def test_backends_agree_with_float64(name: str, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    config = make_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_model_len=8192)
    cache = random_cache(config.layout(dtype), 600, "cuda")
    inp = random_rows(ROWS, cache)
    q_THD = random_queries(inp, config, cache.tensor)
    actual = backend(name, config, dtype).plan(inp, cache).attend(q_THD, 1, cache)
    torch.testing.assert_close(actual.double(), reference(q_THD, inp, cache), rtol=0, atol=TOLERANCES[dtype])


def test_blocks_beyond_two_to_the_31st_number_are_found() -> None:
    """A pool of 5 GiB in bfloat16: offsets no longer fit into 32 bits."""
    config = make_config(num_heads=8, num_kv_heads=8, head_dim=128)
    cache = PagedKVCache(config.layout("bfloat16"), 41_000, "cuda")
    assert cache.tensor.numel() > 2**31
    cache.tensor[-3:].normal_(generator=torch.Generator("cuda").manual_seed(0))
    inp = random_rows([(40, 1)], cache)
    inp.block_table_RB.copy_(torch.tensor([[40_999, 40_998, 40_997]]))
    q_THD = random_queries(inp, config, cache.tensor)
    actual = backend("triton", config, "bfloat16").plan(inp, cache).attend(q_THD, 1, cache)
    torch.testing.assert_close(actual.double(), reference(q_THD, inp, cache), rtol=0, atol=2e-2)
