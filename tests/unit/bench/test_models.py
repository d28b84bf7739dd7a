"""The same weights in each engine's format are the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch

from bench.engine.models import derive
from kvrelay.gguf_metadata import read_header
from kvrelay.model.gguf_weights import GGUFWeights
from kvrelay.model.hf_weights import HFWeights
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_model import make_tiny_model

QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def quantised(directory: Path) -> Path:
    source = make_tiny_model(directory / "tiny", hidden_size=64)
    return make_tiny_gguf(source, directory / "tiny.Q4_1.gguf", kind=gguf.GGMLQuantizationType.Q4_1)


def test_every_derived_model_has_the_quantised_weights_expanded(tmp_path: Path) -> None:
    source = quantised(tmp_path)
    models = derive(source, tmp_path / "derived")

    expected = GGUFWeights(source)
    for weights in (GGUFWeights(models.bf16_gguf), HFWeights(models.hf_directory)):
        torch.testing.assert_close(weights.tensor(QUERY), expected.tensor(QUERY).to(torch.bfloat16).float())
    torch.testing.assert_close(
        GGUFWeights(models.f16_gguf).tensor(QUERY), expected.tensor(QUERY).to(torch.float16).float()
    )
    assert HFWeights(models.hf_directory).config == expected.config


def test_ggufs_keep_metadata_and_float32_norms(tmp_path: Path) -> None:
    source = quantised(tmp_path)
    models = derive(source, tmp_path / "derived")

    before, after = read_header(source), read_header(models.bf16_gguf)
    assert before.metadata.items() <= after.metadata.items()
    assert after.metadata["general.file_type"] == 32  # what llama.cpp calls MOSTLY_BF16
    assert after.tensors["output_norm.weight"].kind == gguf.GGMLQuantizationType.F32
    np.testing.assert_array_equal(GGUFWeights(models.bf16_gguf).tensor(NORM), GGUFWeights(source).tensor(NORM))


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    source = quantised(tmp_path)
    models = derive(source, tmp_path / "derived")
    models.bf16_gguf.write_bytes(b"kept")

    assert derive(source, tmp_path / "derived") == models
    assert models.bf16_gguf.read_bytes() == b"kept"
    assert [path.name for path in models.bf16_gguf.parent.iterdir() if "part" in path.name] == []
