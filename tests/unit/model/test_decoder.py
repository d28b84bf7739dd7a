"""The decoder against transformers' Llama, and against itself under every way of cutting the work into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.decoder import Decoder
from kvrelay.model.weights import load_decoder
from tests.support.steps import Row, run_step
from tests.support.tiny_model import make_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "one_kv_head": {"num_kv_heads": 1},
    "as_many_kv_heads_as_heads": {"num_kv_heads": 4},
    "wide_heads": {"head_dim": 32},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3_rope": {"rope_scaling": LLAMA3},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(directory: Path, token_ids: list[int]) -> Tensor:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def new_cache(decoder: Decoder, num_blocks: int, dtype: str = "float32") -> PagedKVCache:
    """Filled with NaN: whatever a step reads that it should not shows in the logits."""
    cache = PagedKVCache(decoder.config.layout(dtype), num_blocks)
    cache.tensor.fill_(torch.nan)
    return cache


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(make_tiny_model(tmp_path_factory.mktemp("tiny")), dtype="float32")[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_agree_with_transformers(shape: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, seed=3, **SHAPES[shape])
    token_ids = random_ids(150, seed=1)
    _, decoder = load_decoder(directory, dtype="float32")
    row = Row(token_ids, [9, 2, 5, 0, 7, 1, 8, 3, 6, 4])
    (logits,) = run_step(decoder, new_cache(decoder, 10), [(row, 150)])
    torch.testing.assert_close(logits, reference_logits(directory, token_ids), rtol=0, atol=1e-4)


def test_directory_saved_by_transformers_loads(tmp_path: Path) -> None:
    """Written by the library itself: its names, its `rope_parameters`, its eos list, several shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=[7, 9],
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 50_000.0, **LLAMA3},
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, decoder = load_decoder(tmp_path, dtype="float32")
    assert loaded.eos_token_ids == (7, 9)
    assert loaded.rope_theta == 50_000.0
    token_ids = random_ids(100, seed=2)
    (logits,) = run_step(decoder, new_cache(decoder, 7), [(Row(token_ids, list(range(7))), 100)])
    torch.testing.assert_close(logits, reference_logits(tmp_path, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunks", [[16, 16, 16, 2], [1] * 50, [17, 1, 30, 2], [49, 1]])
def test_any_chunks_give_the_logits_of_one_pass(tiny: Decoder, chunks: list[int]) -> None:
    token_ids = random_ids(50, seed=4)
    (whole,) = run_step(tiny, new_cache(tiny, 4), [(Row(token_ids, [0, 1, 2, 3]), 50)])
    row, cache = Row(token_ids, [3, 0, 2, 1]), new_cache(tiny, 4)
    parts = [run_step(tiny, cache, [(row, count)])[0] for count in chunks]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)


def test_rows_of_a_mixed_batch_do_not_touch_each_other(tiny: Decoder) -> None:
    """Prompt chunks and single tokens, very short and very long rows, in one step."""
    lengths, last_counts = [3, 400, 40, 17, 33, 250], [1, 1, 20, 1, 33, 2]
    prompts = [random_ids(length, seed=10 + index) for index, length in enumerate(lengths)]
    alone = []
    for prompt, count in zip(prompts, last_counts, strict=True):
        (logits,) = run_step(tiny, new_cache(tiny, 25), [(Row(prompt, list(range(25))), len(prompt))])
        alone.append(logits[-count:])
    cache = new_cache(tiny, 70)
    free = torch.randperm(70, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [Row(prompt, [free.pop() for _ in range(-(-len(prompt) // 16))]) for prompt in prompts]
    for row, count in zip(rows, last_counts, strict=True):
        if len(row.token_ids) > count:
            run_step(tiny, cache, [(row, len(row.token_ids) - count)])
    together = run_step(tiny, cache, list(zip(rows, last_counts, strict=True)))
    for logits, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_a_poisoned_row_leaves_its_neighbours_alone(tiny: Decoder) -> None:
    rows = [Row(random_ids(20, seed=seed), [2 * seed, 2 * seed + 1]) for seed in range(3)]
    (expected,) = run_step(tiny, new_cache(tiny, 2), [(Row(rows[0].token_ids, [0, 1]), 20)])
    cache = new_cache(tiny, 6)
    run_step(tiny, cache, [(row, 19) for row in rows])
    cache.tensor[2] = torch.nan
    good, bad, _ = run_step(tiny, cache, [(row, 1) for row in rows])
    torch.testing.assert_close(good[-1], expected[-1], rtol=0, atol=2e-5)
    assert bad.isnan().all()


def test_kv_moved_as_slabs_to_other_blocks_of_another_cache_decodes_on(tiny: Decoder) -> None:
    token_ids = random_ids(41, seed=5)
    (whole,) = run_step(tiny, new_cache(tiny, 3), [(Row(token_ids, [0, 1, 2]), 41)])
    source, target = new_cache(tiny, 3), new_cache(tiny, 9)
    run_step(tiny, source, [(Row(token_ids, [2, 0, 1]), 40)])
    for source_block, target_block in zip([2, 0, 1], [4, 8, 6], strict=True):
        target.write_slab(target_block, source.read_slab(source_block))
    (last,) = run_step(tiny, target, [(Row(token_ids, [4, 8, 6], num_done=40), 1)])
    torch.testing.assert_close(last[0], whole[-1], rtol=0, atol=2e-5)


def test_only_wanted_rows_get_logits(tiny: Decoder) -> None:
    from dataclasses import replace

    from tests.support.steps import step_input

    row = Row(random_ids(20, seed=6), [0, 1])
    inp = step_input([(row, 20)], 16)
    every = tiny.step(inp, new_cache(tiny, 2))
    some = tiny.step(replace(inp, logit_rows_N=torch.tensor([19, 4])), new_cache(tiny, 2))
    none = tiny.step(replace(inp, logit_rows_N=torch.tensor([], dtype=torch.int64)), new_cache(tiny, 2))
    torch.testing.assert_close(some, every[[19, 4]], rtol=0, atol=2e-5)
    assert none.shape == (0, 288)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    token_ids = random_ids(40, seed=7)
    _, decoder = load_decoder(directory, dtype=dtype)
    row, cache = Row(token_ids, [0, 1, 2]), new_cache(decoder, 3, dtype)
    logits = torch.cat([run_step(decoder, cache, [(row, count)])[0] for count in (20, 19, 1)])
    assert logits.dtype == torch.float32
    expected = reference_logits(directory, token_ids)
    assert torch.cosine_similarity(logits, expected, dim=-1).min() > 0.995
