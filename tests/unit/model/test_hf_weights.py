from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.errors import ModelFileError
from kvrelay.model.hf_weights import HFWeights
from kvrelay.model.weights import load_decoder
from tests.support.tiny_model import make_tiny_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def change_config(directory: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        load_decoder(directory, dtype="float32")
    return caught.value.message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FalconForCausalLM"]}, "architecture 'FalconForCausalLM' is not served; known are "),
        ({"architectures": None, "model_type": "t5"}, "architecture 't5' is not served; known are "),
        ({"attention_bias": True}, "config.json sets attention_bias, which is not served"),
        ({"mlp_bias": True}, "config.json sets mlp_bias, which is not served"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act 'gelu'; only 'silu' is served"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"num_hidden_layers": 0}, "the model's num_layers is 0; it must be at least 1"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide among 3 KV heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling 'yarn' is not served; known are "),
        ({"rope_scaling": {"type": "linear"}}, "config.json's linear rotary scaling has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 rotary scaling has no low_freq_factor"),
        ({"vocab_size": 300}, "embed_tokens.weight has shape [288, 64]; the config says [300, 64]"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], message: str, directory: Path) -> None:
    change_config(directory, **changes)
    assert message in refusal(directory)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")
    assert refusal(directory) == f"{directory} has no tensor model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, directory: Path) -> None:
    (directory / name).unlink()
    assert refusal(directory).startswith(f"there is no model file {directory / name}")


@pytest.mark.parametrize("num_bytes", [0, 5, 1000, 100_000])
def test_truncated_weights_are_told_as_such(num_bytes: int, directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:num_bytes])
    assert refusal(directory).startswith(f"{weights} is not a whole safetensors file (truncated download?)")


def test_a_config_that_is_not_json_is_told_as_such(directory: Path) -> None:
    (directory / "config.json").write_text('{"hidden_size": ')
    assert refusal(directory).startswith(f"{directory / 'config.json'} is not JSON")
    (directory / "config.json").write_text("[]")
    assert refusal(directory) == f"{directory / 'config.json'} must hold a JSON object"


def test_shards_are_found_by_the_index_and_a_missing_one_is_named(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file_name, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / file_name)
    weight_map = {name: file_name for file_name, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = HFWeights(directory)
    assert all(torch.equal(source.tensor(name), tensors[name]) for name in names)
    (directory / "b.safetensors").unlink()
    assert refusal(directory).startswith(f"there is no model file {directory / 'b.safetensors'}")


def test_bfloat16_weights_are_widened(directory: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    weight = HFWeights(directory).tensor("model.norm.weight")
    assert weight.dtype == torch.float32
    assert torch.equal(weight, tensors["model.norm.weight"].float())


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(2, None, (2,)), ([2, 5], None, (2, 5)), (2, [5, 2, 7], (2, 5, 7)), (None, 9, (9,)), (None, None, ())],
)
def test_end_of_sequence_ids_of_both_configs_count(
    config_eos: Any, generation_eos: Any, expected: tuple[int, ...], directory: Path
) -> None:
    change_config(directory, eos_token_id=config_eos)
    if generation_eos is not None:
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert HFWeights(directory).config.eos_token_ids == expected


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}},
    ],
    ids=["transformers_4", "transformers_5"],
)
def test_rotary_settings_are_read_in_old_and_new_form(rope: dict[str, Any], directory: Path) -> None:
    change_config(directory, **rope)
    config = HFWeights(directory).config
    assert config.rope_theta == 5000.0
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 3.0)
