"""KV of a token, counted from the configs of models that kvrelay serves and of those that it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import ModelFileError
from kvrelay.model.kv_shape import KVShape, read_kv_shape, shape_from_gguf, shape_from_hf

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_70B = LLAMA_3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA_3_1_405B = LLAMA_3_70B | {"hidden_size": 16384, "num_attention_heads": 128, "num_hidden_layers": 126}
QWEN_2_5_72B = LLAMA_3_70B | {
    "architectures": ["Qwen2ForCausalLM"],
    "sliding_window": 131072,
    "use_sliding_window": False,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def of(**values: Any) -> KVShape:
    """Four layers, hidden size 64, eight heads, unless said otherwise; None takes a key away."""
    config = {"architectures": ["SomeModel"], "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8}
    return shape_from_hf({key: value for key, value in (config | values).items() if value is not None})


@pytest.mark.parametrize(
    ("config", "bytes_in_16_bits"),
    [
        pytest.param(LLAMA_3_8B, 128 * 1024, id="Llama-3-8B, 128 KiB"),
        pytest.param(LLAMA_3_70B, 320 * 1024, id="Llama-3-70B, 320 KiB"),
        # DeepSeek-V3's report on hardware (arXiv 2505.09343), table 1: 516.096, 327.680 and 70.272 KB.
        pytest.param(LLAMA_3_1_405B, 516_096, id="Llama-3.1-405B"),
        pytest.param(QWEN_2_5_72B, 327_680, id="Qwen2.5-72B"),
        pytest.param(DEEPSEEK_V3, 70_272, id="DeepSeek-V3"),
    ],
)
def test_published_bytes_of_a_token(config: dict[str, Any], bytes_in_16_bits: int) -> None:
    assert shape_from_hf(config).token_values * 2 == bytes_in_16_bits


def test_published_bytes_of_long_prompts() -> None:
    assert shape_from_hf(LLAMA_3_8B).token_values * 2 * 8192 == 2**30
    llama_3_3_70b = LLAMA_3_70B | {"max_position_embeddings": 131072}
    assert round(shape_from_hf(llama_3_3_70b).token_values * 2 * 64_000 / 1e9, 2) == 20.97


def test_a_model_that_is_served_and_how_its_numbers_come_about() -> None:
    assert shape_from_hf(LLAMA_3_8B) == KVShape(
        architecture="LlamaForCausalLM",
        token_values=65_536,
        formula="32 layers x 8 KV heads x (128 + 128)",
        max_model_len=8192,
        unserved="",
        overcounted="",
    )
    assert shape_from_gguf(GGUF) == KVShape("llama", 11_520, "30 layers x 3 KV heads x (64 + 64)", 8192, "", "")


def test_a_model_that_is_not_served_says_why() -> None:
    assert "'Qwen2ForCausalLM' is not served" in shape_from_hf(QWEN_2_5_72B).unserved
    assert "attention_bias" in shape_from_hf(LLAMA_3_8B | {"attention_bias": True}).unserved
    assert "'qwen2' is not served" in shape_from_gguf({"general.architecture": "qwen2", **renamed("qwen2")}).unserved


def renamed(architecture: str) -> dict[str, Any]:
    """GGUF's numbers, of another architecture."""
    return {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items() if key[0] == "l"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({}, 4 * 8 * 16, id="as many KV heads as heads"),
        pytest.param({"head_dim": 32}, 4 * 8 * 64, id="a head dim of its own"),
        pytest.param({"v_head_dim": 4}, 4 * 8 * 12, id="values shorter than keys"),
        pytest.param({"multi_query": True}, 4 * 1 * 16, id="Falcon-7B: one KV head"),
        pytest.param(
            {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 4 * 2 * 16, id="Falcon-40B"
        ),
        pytest.param(
            {"num_hidden_layers": None, "num_layers": 4, "kv_channels": 10, "multi_query_group_num": 2},
            4 * 2 * 20,
            id="ChatGLM",
        ),
        pytest.param({"num_key_value_heads": [1, 2, 0, 4]}, 7 * 16, id="layer by layer"),
        pytest.param(
            {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
            | {"linear_num_key_heads": 16},
            1 * 8 * 16,
            id="Qwen3-Next: every fourth layer keeps KV",
        ),
    ],
)
def test_other_ways_to_say_it(values: dict[str, Any], expected: int) -> None:
    assert of(**values).token_values == expected


def test_the_names_of_gpt_2() -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    shape = shape_from_hf(config)
    assert (shape.token_values, shape.max_model_len) == (12 * 2 * 768, 1024)


@pytest.mark.parametrize("names", [None, [], {"a": 1}, "LlamaForCausalLM"])
def test_without_a_list_of_architectures_the_type_is_the_name(names: object) -> None:
    shape = of(architectures=names, model_type="strange")
    assert (shape.architecture, shape.unserved) == (
        "strange",
        "architecture 'strange' is not served; known are LlamaForCausalLM",
    )


def test_a_model_for_images_has_its_numbers_one_level_down() -> None:
    shape = shape_from_hf({"architectures": ["SomeVisionModel"], "text_config": LLAMA_3_8B, "hidden_size": 7})
    assert (shape.architecture, shape.token_values) == ("SomeVisionModel", 65_536)
    assert "'SomeVisionModel' is not served" in shape.unserved


def test_gguf_with_heads_layer_by_layer_and_with_latents() -> None:
    by_layer = {"llama.block_count": 3, "llama.attention.head_count_kv": [3, 0, 1], "llama.ssm.state_size": 16}
    shape = shape_from_gguf(GGUF | by_layer)
    assert (shape.token_values, shape.formula) == (4 * 128, "4 KV heads in 2 layers x (64 + 64)")
    assert shape.unserved == "its layers differ in what they keep"
    latents = {"deepseek2.attention.kv_lora_rank": 512, "deepseek2.rope.dimension_count": 64}
    shape = shape_from_gguf({"general.architecture": "deepseek2", **renamed("deepseek2"), **latents})
    assert shape.token_values == 30 * 576


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sliding_window": 512}, "a window only"),
        ({"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}, "a window only"),
        ({"num_kv_shared_layers": 2}, "share their KV"),
        ({"sliding_window": 512, "use_sliding_window": False}, ""),
    ],
)
def test_what_may_be_less_is_said(values: dict[str, Any], said: str) -> None:
    shape = of(**values)
    assert shape.token_values == 4 * 8 * 16
    assert said in shape.overcounted if said else not shape.overcounted


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": None}, "config.json has none of num_hidden_layers, .*is it the config of a language"),
        ({"num_attention_heads": None}, "config.json has none of num_attention_heads"),
        ({"hidden_size": None}, "config.json has none of hidden_size"),
        ({"num_hidden_layers": "many"}, "config.json has num_hidden_layers 'many'; a whole number"),
        ({"num_hidden_layers": 0}, "config.json has num_hidden_layers 0; a whole number"),
        ({"hidden_size": 4}, "divides a hidden size of 4 among 8 heads"),
        ({"num_key_value_heads": [1, 2]}, r"config.json has num_key_value_heads \[1, 2\]; 4 whole numbers"),
        ({"num_key_value_heads": [0] * 4}, "no layer of the model keeps KV"),
        ({"layer_types": ["mamba"] * 4}, "no layer of the model keeps KV"),
        ({"layer_types": ["full_attention"]}, "lists the kinds of 1 layers, and has 4"),
        ({"layer_types": ["magic"] * 4}, "layers of kind magic; plan knows attention, full_attention"),
        ({"layer_types": 5}, "has layer_types 5; a list was expected"),
        ({"num_hidden_layers": 10**12}, "has 1000000000000 layers; at most 10000 are believed"),
        ({"mamba_d_state": 16}, "config.json has mamba_d_state: not every layer"),
        ({"attn_config": {"kv_n_heads": 8}}, "config.json has attn_config: not every layer"),
        ({"index_head_dim": 128}, "config.json has index_head_dim: not every layer"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"kv_lora_rank": 512}, "config.json has none of qk_rope_head_dim"),
    ],
)
def test_what_cannot_be_counted_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        of(**values)


def test_gguf_that_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"the GGUF file has ssm.state_size: not every layer"):
        shape_from_gguf(GGUF | {"llama.ssm.state_size": 16})
    with pytest.raises(ModelFileError, match=r"the GGUF file has none of .*block_count"):
        shape_from_gguf({"general.architecture": "clip"})


def test_of_a_directory_only_the_config_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"there is no model file .*config\.json"):
        read_kv_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert read_kv_shape(tmp_path).token_values == 65_536
    with pytest.raises(ModelFileError, match="there is no model file"):
        read_kv_shape(tmp_path / "absent.gguf")
