from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

from kvrelay.errors import ModelFileError
from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.decoder import Decoder
from kvrelay.model.gguf_weights import GGUFWeights
from kvrelay.model.hf_weights import HFWeights
from kvrelay.model.weights import load_decoder
from tests.support.steps import Row, run_step
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_model import make_tiny_model

TOKENS = list(range(3, 103))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), seed=2)


def logits_of(path: Path) -> torch.Tensor:
    decoder: Decoder
    config, decoder = load_decoder(path, dtype="float32")
    cache = PagedKVCache(config.layout("float32"), 7)
    return run_step(decoder, cache, [(Row(TOKENS, list(range(7))), len(TOKENS))])[0]


@pytest.mark.parametrize("tied", [True, False])
def test_gguf_gives_the_same_logits_as_the_directory(tied: bool, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "hf", seed=5, tie_word_embeddings=tied)
    path = make_tiny_gguf(directory, tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits_of(path), logits_of(directory), rtol=0, atol=1e-5)


def test_q_and_k_rows_come_back_in_half_split_order(directory: Path, tmp_path: Path) -> None:
    source = GGUFWeights(make_tiny_gguf(directory, tmp_path / "tiny.gguf"))
    expected = HFWeights(directory)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        full_name = f"model.layers.1.self_attn.{name}.weight"
        assert torch.equal(source.tensor(full_name), expected.tensor(full_name))


def test_config_is_read_from_the_file(directory: Path, tmp_path: Path) -> None:
    config = GGUFWeights(make_tiny_gguf(directory, tmp_path / "tiny.gguf")).config
    assert config.architecture == HFWeights(directory).config.architecture == "llama"
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (2, 64, 128)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.max_model_len, config.eos_token_ids) == (288, 1024, (2,))
    assert config.tie_word_embeddings
    assert config.rope_theta == 10_000.0


@pytest.mark.parametrize(
    ("kind", "worst"),
    [("F16", 1e-3), ("BF16", 4e-3), ("Q8_0", 0.02), ("Q4_0", 0.2), ("Q4_1", 0.2), ("Q5_1", 0.1)],
)
def test_quantised_matrices_are_dequantised(kind: str, worst: float, directory: Path, tmp_path: Path) -> None:
    source = GGUFWeights(
        make_tiny_gguf(directory, tmp_path / "tiny.gguf", kind=getattr(gguf.GGMLQuantizationType, kind))
    )
    name = "model.layers.0.mlp.down_proj.weight"
    error = (source.tensor(name) - HFWeights(directory).tensor(name)).abs().max()
    assert 0 < error < worst


def test_rope_freqs_tensor_divides_the_frequencies(directory: Path, tmp_path: Path) -> None:
    """Divisors of 2 throughout are linear scaling by 2."""
    scaled = make_tiny_model(tmp_path / "hf", seed=2, rope_scaling={"rope_type": "linear", "factor": 2.0})
    path = make_tiny_gguf(directory, tmp_path / "tiny.gguf", extra={"rope_freqs.weight": torch.full((8,), 2.0)})
    torch.testing.assert_close(logits_of(path), logits_of(scaled), rtol=0, atol=1e-5)


def test_linear_rope_scaling_is_read_from_the_file(directory: Path, tmp_path: Path) -> None:
    scaled = make_tiny_model(tmp_path / "hf", seed=2, rope_scaling={"rope_type": "linear", "factor": 4.0})
    metadata: dict[str, str | int | float] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = make_tiny_gguf(directory, tmp_path / "tiny.gguf", metadata=metadata)
    torch.testing.assert_close(logits_of(path), logits_of(scaled), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_k.weight"])
def test_a_missing_tensor_is_named(name: str, directory: Path, tmp_path: Path) -> None:
    path = make_tiny_gguf(directory, tmp_path / "tiny.gguf", without=(name,))
    with pytest.raises(ModelFileError, match=f"has no tensor {name}"):
        load_decoder(path, dtype="float32")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "rotary scaling 'yarn' is not served"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8; only the head dim, 16, is served"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads do not divide among 3 KV heads"),
        (
            {"llama.feed_forward_length": 256},
            r"mlp.gate_proj.weight has shape \[128, 64\]; the config says \[256, 64\]",
        ),
    ],
    ids=["yarn", "experts", "partial_rotary", "heads", "shape"],
)
def test_what_is_not_served_is_refused_by_name(
    metadata: dict[str, str | int | float], message: str, directory: Path, tmp_path: Path
) -> None:
    path = make_tiny_gguf(directory, tmp_path / "tiny.gguf", metadata=metadata)
    with pytest.raises(ModelFileError, match=message):
        load_decoder(path, dtype="float32")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gpt2")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="architecture 'gpt2' is not served; known are llama"):
        load_decoder(tmp_path / "x.gguf", dtype="float32")


@pytest.mark.parametrize("share", [0.0, 0.00005, 0.0001, 0.001, 0.003, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_told_as_such(share: float, directory: Path, tmp_path: Path) -> None:
    content = make_tiny_gguf(directory, tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelFileError, match=r"cut.gguf is not a whole GGUF file \(truncated download\?\)"):
        load_decoder(cut, dtype="float32")


def test_another_kind_of_file_is_told_as_such(tmp_path: Path) -> None:
    other = tmp_path / "page.gguf"
    other.write_text("<html>404 not found</html>" * 100)
    with pytest.raises(ModelFileError, match=r"page\.gguf is not a GGUF file: it starts with b'<htm', not b'GGUF'$"):
        load_decoder(other, dtype="float32")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"there is no model file .*nowhere.gguf"):
        load_decoder(tmp_path / "nowhere.gguf", dtype="float32")
