"""The native decoder against the plain one, on whatever instruction sets this CPU has."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from kvrelay.errors import ConfigError
from kvrelay.kv.cache import PagedKVCache
from kvrelay.model import native
from kvrelay.model.native import DIRECTORY, VARIANTS, Library, find_library
from kvrelay.model.native_decoder import Kind, NativeDecoder
from kvrelay.model.native_weights import load_native
from kvrelay.model.weights import load_decoder, open_weights
from tests.support.steps import Row, run_step, step_input
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_model import make_tiny_model

LIBRARIES = [
    Library(variant, DIRECTORY / variant.file_name)
    for variant in VARIANTS
    if variant.cpu_flags <= native.cpu_flags() and (DIRECTORY / variant.file_name).exists()
]
pytestmark = pytest.mark.skipif(
    not LIBRARIES and (shutil.which("g++") is None or not VARIANTS[-1].cpu_flags <= native.cpu_flags()),
    reason="no compiler, or a CPU without AVX2",
)
SHAPES = {
    "three_heads_to_a_kv_head": {"hidden_size": 96, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32},
    "odd_vocabulary": {"vocab_size": 291, "head_dim": 64, "num_heads": 2, "num_kv_heads": 1},
    "untied": {"tie_word_embeddings": False, "head_dim": 32},
    "no_sharing_of_kv_heads": {"head_dim": 64, "num_heads": 3, "num_kv_heads": 3},
    "more_heads_than_one_pass_takes": {"head_dim": 32, "num_heads": 10, "num_kv_heads": 2},
    "wide_heads": {"head_dim": 128, "num_heads": 2, "num_kv_heads": 1},
    "heads_of_three_vectors": {"head_dim": 96, "num_heads": 2, "num_kv_heads": 1},
    "llama3_rope": {
        "head_dim": 32,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}
# Tokens that each of five rows computes in each step: chunks, single tokens, both at once, and few enough rows that
# the threads share one context; the lengths pass the borders of tiles (5, 64, 128) in every direction.
STEPS = [
    (130, 70, 1, 5, 17),
    (1, 1, 1, 1, 1),
    (300, 1, 0, 4, 0),
    (1, 0, 0, 0, 0),
    (0, 2, 3, 60, 1),
    (1, 1, 1, 1, 1),
    (0, 0, 1, 1, 0),
    (64, 0, 0, 0, 128),
]


def test_the_library_is_built_where_it_can_be() -> None:
    assert LIBRARIES
    best = find_library()
    assert best is not None
    assert best.name == LIBRARIES[0].name


def run_steps(decoder: object, cache: PagedKVCache) -> list[Tensor]:
    """The logits of every step; blocks lie in no order, and what nobody wrote is NaN."""
    cache.tensor.fill_(torch.nan)
    generator = torch.Generator().manual_seed(7)
    totals = [sum(counts) for counts in zip(*STEPS, strict=True)]
    free = torch.randperm(cache.num_blocks, generator=generator).tolist()
    rows = []
    for total in totals:
        num_blocks = cache.layout.blocks_for(total)
        token_ids = torch.randint(3, 259, (total,), generator=generator).tolist()
        rows.append(Row(token_ids, [free.pop() for _ in range(num_blocks)]))
    return [
        torch.cat(run_step(decoder, cache, [(row, count) for row, count in zip(rows, counts, strict=True) if count]))
        for counts in STEPS
    ]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_float32_logits_are_those_of_the_plain_decoder(
    library: Library, shape: str, num_threads: int, tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, seed=3, **SHAPES[shape])  # type: ignore[arg-type]
    config, plain = load_decoder(directory, dtype="float32", decoder="torch")
    decoder = load_native(open_weights(directory), "float32", library, num_threads=num_threads, weights="file")
    for block_tokens, num_blocks in ((16, 100), (5, 250), (1, 1000)):
        layout = config.layout("float32", block_tokens)
        expected = run_steps(plain, PagedKVCache(layout, num_blocks))
        for ours, theirs in zip(run_steps(decoder, PagedKVCache(layout, num_blocks)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_bfloat16_is_as_near_to_float32_as_the_plain_decoder_is(library: Library, shape: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, seed=3, **SHAPES[shape])  # type: ignore[arg-type]
    config, exact = load_decoder(directory, dtype="float32", decoder="torch")
    _, plain = load_decoder(directory, dtype="bfloat16", decoder="torch")
    decoder = load_native(open_weights(directory), "bfloat16", library, num_threads=2, weights="file")
    expected = run_steps(exact, PagedKVCache(config.layout("float32", 16), 100))
    theirs = run_steps(plain, PagedKVCache(config.layout("bfloat16", 16), 100))
    ours = run_steps(decoder, PagedKVCache(config.layout("bfloat16", 16), 100))
    for step, reference in enumerate(expected):
        error, their_error = (ours[step] - reference).abs().mean(), (theirs[step] - reference).abs().mean()
        assert error < 1.3 * their_error, step


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_quantised_matrices_count_as_their_exact_values(library: Library, kind: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "tiny", seed=3, hidden_size=96, num_heads=6, head_dim=32, vocab_size=291)
    path = make_tiny_gguf(directory, tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType[kind])
    config, exact = load_decoder(path, dtype="float32", decoder="torch")
    expected = run_steps(exact, PagedKVCache(config.layout("float32", 16), 100))
    decoder = load_native(open_weights(path), "float32", library, num_threads=2, weights="file")
    for ours, theirs in zip(run_steps(decoder, PagedKVCache(config.layout("float32", 16), 100)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)
    rounded = load_native(open_weights(path), "bfloat16", library, num_threads=2, weights="dtype")
    theirs = run_steps(rounded, PagedKVCache(config.layout("bfloat16", 16), 100))
    for weights in ("file", "both"):
        decoder = load_native(open_weights(path), "bfloat16", library, num_threads=2, weights=weights)
        ours = run_steps(decoder, PagedKVCache(config.layout("bfloat16", 16), 100))
        for step, reference in enumerate(expected):
            error, their_error = (ours[step] - reference).abs().mean(), (theirs[step] - reference).abs().mean()
            assert error < 1.3 * their_error, (weights, step)


def test_a_step_without_wanted_logits_writes_its_kv_all_the_same(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, head_dim=32)
    config, plain = load_decoder(directory, dtype="float32", decoder="torch")
    _, decoder = load_decoder(directory, dtype="float32", decoder="native")
    caches = [PagedKVCache(config.layout("float32", 16), 4) for _ in range(2)]
    for each, cache in zip((plain, decoder), caches, strict=True):
        inp = step_input([(Row(list(range(20, 60)), [2, 0, 3]), 40)], 16)
        logits = each.step(replace(inp, logit_rows_N=torch.empty(0, dtype=torch.int64)), cache)
        assert tuple(logits.shape) == (0, 288)
    torch.testing.assert_close(caches[1].tensor, caches[0].tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_nan_among_the_keys_is_not_softened_into_numbers(library: Library, num_tokens: int, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, head_dim=32)
    decoder = load_native(open_weights(directory), "float32", library, num_threads=2, weights="file")
    cache = PagedKVCache(decoder.config.layout("float32", 16), 4)
    row = Row(list(range(20, 60)), [2, 0, 3])
    run_step(decoder, cache, [(row, 10)])
    cache.keys(0)[2, 4] = torch.nan
    (logits,) = run_step(decoder, cache, [(row, num_tokens)])
    assert logits.isnan().all()


def test_a_library_of_other_source_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that an update left behind: its structures may be other ones."""
    for path in DIRECTORY.iterdir():
        shutil.copy(path, tmp_path)
    with (tmp_path / "step.h").open("a") as header:
        header.write("// changed\n")
    monkeypatch.setattr(native, "DIRECTORY", tmp_path)
    find_library.cache_clear()
    try:
        assert find_library() is None
        assert "was built from other source" in caplog.text
    finally:
        find_library.cache_clear()


def test_both_forms_are_kept_only_where_the_quantised_one_can_be_quicker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = make_tiny_gguf(
        make_tiny_model(tmp_path / "tiny", head_dim=32), tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q4_1
    )
    for library in LIBRARIES:
        for dtype in ("float32", "bfloat16"):
            kinds = []
            caplog.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(NativeDecoder, "set_matrix", lambda _, _l, _p, kind, *_r, kinds=kinds: kinds.append(kind))
                load_native(open_weights(path), dtype, library, num_threads=1, weights="both")
            assert (Kind.Q4_1 in kinds) == (library.name == "avx512_bf16" and dtype == "bfloat16")
            assert {Kind.F32: "float32", Kind.BF16: "bfloat16"}[kinds[-1]] == dtype
            assert (f"kept in {dtype} alone" in caplog.text) == (Kind.Q4_1 not in kinds)
    load_decoder(path, dtype="bfloat16", weights="both", decoder="torch")
    assert "plain torch computes with no quantised ones" in caplog.text


def test_what_the_native_decoder_cannot_compute_is_told_or_left_to_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_tiny_model(tmp_path, head_dim=16)
    assert load_decoder(directory, dtype="float32")[1].backend_name == "torch-plain"
    assert "head_dim is 16, not a multiple of" in caplog.text
    with pytest.raises(ConfigError, match="head_dim is 16"):
        load_decoder(directory, dtype="float32", decoder="native")
    with pytest.raises(ConfigError, match="not in float16"):
        load_decoder(make_tiny_model(tmp_path / "wide", head_dim=64), dtype="float16", decoder="native")


def test_without_the_library_plain_torch_serves_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "DIRECTORY", tmp_path)
    find_library.cache_clear()
    try:
        directory = make_tiny_model(tmp_path / "tiny", head_dim=64)
        assert load_decoder(directory, dtype="float32")[1].backend_name == "torch-plain"
        assert load_decoder(directory, dtype="float32")[1].backend_name == "torch-plain"
        assert caplog.text.count("was not built, which needs a C++ compiler") == 1
        with pytest.raises(ConfigError, match="there is none"):
            load_decoder(directory, dtype="float32", decoder="native")
    finally:
        find_library.cache_clear()
