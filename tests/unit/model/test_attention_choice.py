"""Which backend a device gets, and what is said about those that were passed over."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.model import attention_choice, attention_varlen
from kvrelay.model.attention import BackendUnavailable
from kvrelay.model.attention_choice import choose_backend
from kvrelay.model.attention_varlen import VarlenPagedAttention, paged_varlen_attn
from tests.support.paged import make_config, random_cache, random_queries, random_rows


def varlen_of_2_11(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
                   return_aux: Any = None, scale: float | None = None,
                   window_size: tuple[int, int] = (-1, -1)) -> None: ...  # fmt: skip


def unavailable(reason: str) -> Any:
    def make(*_: object) -> None:
        raise BackendUnavailable(reason)

    return make


def test_a_cpu_gets_the_plain_backend() -> None:
    assert choose_backend("cpu", make_config(), torch.float32).name == "plain"


def test_a_gpu_gets_varlen_attention_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VarlenPagedAttention, "probed", lambda *_: SimpleNamespace(name="varlen"))
    caplog.set_level(logging.INFO)
    assert choose_backend("cuda", make_config(), torch.bfloat16).name == "varlen"
    assert "attention: varlen" in caplog.text


def test_a_gpu_gets_triton_next_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VarlenPagedAttention, "probed", unavailable("varlen_attn of torch 2.11.0 has no block_table"))
    monkeypatch.setattr(attention_choice, "_triton", lambda *_: SimpleNamespace(name="triton"))
    caplog.set_level(logging.INFO)
    assert choose_backend("cuda", make_config(), torch.bfloat16).name == "triton"
    assert "attention: varlen_attn of torch 2.11.0 has no block_table" in caplog.text


def test_a_gpu_without_kernels_is_served_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VarlenPagedAttention, "probed", unavailable("no"))
    monkeypatch.setattr(attention_choice, "find_spec", lambda name: None)
    caplog.set_level(logging.INFO)
    assert choose_backend("cuda", make_config(), torch.bfloat16).name == "plain"
    assert "triton is not installed" in caplog.text
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "attention: plain, many times slower than this GPU; install triton for its kernel"
    ]


def test_varlen_attention_of_torch_2_11_has_no_block_table() -> None:
    with pytest.raises(BackendUnavailable, match="has no block_table, enable_gqa, seqused_k"):
        paged_varlen_attn(SimpleNamespace(varlen_attn=varlen_of_2_11))  # type: ignore[arg-type]


def test_the_reasons_against_varlen_attention_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_varlen, "paged_varlen_attn", lambda: varlen_of_2_11)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(BackendUnavailable, match=r"bfloat16 and float16, not torch\.float32"):
        VarlenPagedAttention.probed("cuda", make_config(), torch.float32)
    with pytest.raises(BackendUnavailable, match="in eights up to 256, not 12"):
        VarlenPagedAttention.probed("cuda", make_config(head_dim=12), torch.bfloat16)
    with pytest.raises(BackendUnavailable, match=r"needs compute capability 9\.0; this GPU has \(8, 0\)"):
        VarlenPagedAttention.probed("cuda", make_config(), torch.bfloat16)


def test_without_flash_attention_3_varlen_attention_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_varlen, "paged_varlen_attn", lambda: varlen_of_2_11)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(BackendUnavailable, match=r"FlashAttention 3 is not there \(package flash-attn-3\): .*flash"):
        VarlenPagedAttention.probed("cuda", make_config(), torch.bfloat16)


def test_varlen_attention_is_called_with_what_its_documentation_asks_for() -> None:
    """The fake holds the arguments against torch's description; the arithmetic is for tests/gpu."""
    config = make_config()
    cache = random_cache(config.layout("float32", 16), 12)
    inp = random_rows([(40, 1), (0, 20)], cache)
    q_THD = random_queries(inp, config, cache.tensor)
    calls: list[dict[str, Any]] = []

    def fake(query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, **kw: Any) -> Any:
        calls.append({"cu_seq_q": cu_seq_q.tolist(), "cu_seq_k": cu_seq_k, "max_q": max_q, "max_k": max_k, **kw})
        assert key.shape == value.shape == (13, 16, 2, 8)  # pages, page size, KV heads, head dim
        assert key.stride(-1) == 1
        assert key.data_ptr() == cache.tensor[0, 1, 0].data_ptr()
        assert value.data_ptr() == cache.tensor[0, 1, 1].data_ptr()
        return query + 1

    backend = VarlenPagedAttention(fake, config.max_model_len)
    assert torch.equal(backend.plan(inp, cache).attend(q_THD, 1, cache), q_THD + 1)
    (call,) = calls
    assert call["cu_seq_q"] == [0, 1, 21]
    assert (call["cu_seq_k"], call["max_q"], call["max_k"]) == (None, 20, 41)
    assert (call["window_size"], call["enable_gqa"]) == ((-1, 0), True)
    assert call["seqused_k"].dtype == call["block_table"].dtype == torch.int32
    assert call["seqused_k"].tolist() == [41, 20]
    assert call["block_table"].shape == (2, 3)


def test_varlen_attention_in_a_graph_keeps_its_tensors() -> None:
    calls: list[Any] = []
    backend = VarlenPagedAttention(lambda *args, **kw: calls.append((args, kw)) or args[0], 4096)
    cache = random_cache(make_config().layout("float32", 16), 4)
    lens, table = torch.tensor([5, 1], dtype=torch.int32), torch.zeros(2, 256, dtype=torch.int32)
    backend.plan_decode(lens, table, cache).attend(torch.zeros(2, 6, 8), 0, cache)
    ((args, keywords),) = calls
    assert args[3].tolist() == [0, 1, 2]
    assert args[5:] == (1, 4096)
    assert keywords["seqused_k"] is lens
    assert keywords["block_table"] is table


def test_this_torchs_varlen_attention_takes_a_block_table_from_2_12_on() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version >= (2, 12):
        assert callable(paged_varlen_attn())
    else:
        with pytest.raises(BackendUnavailable):
            paged_varlen_attn()
