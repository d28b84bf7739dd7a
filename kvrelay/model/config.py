"""The shape of a decoder, read from a GGUF file's metadata or a Hugging Face config.json.

What the decoder cannot compute is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvrelay.errors import ModelFileError
from kvrelay.kv.layout import KVLayout

# What config.json calls an architecture, and our name for it, which is GGUF's.
HF_ARCHITECTURES = {"LlamaForCausalLM": "llama"}
GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts; the last three belong to `llama3` only."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # of GGUF_ARCHITECTURES, whatever the files are
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_model_len: int  # token positions, prompt and answer together
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = {
            name: getattr(self, name)
            for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        } | {"vocab_size": self.vocab_size, "max_model_len": self.max_model_len}
        for name, size in sizes.items():
            if size < 1:
                raise ModelFileError(f"the model's {name} is {size}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(f"{self.num_heads} attention heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelFileError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")

    def layout(self, dtype: str, block_tokens: int = 16) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            block_tokens=block_tokens,
        )


def from_gguf(metadata: Mapping[str, Any], *, vocab_size: int, tie_word_embeddings: bool) -> ModelConfig:
    """Config from GGUF key-values; the two keywords are read off the tensors, since files may lack the keys.

    Raises ModelFileError for an architecture or a feature that is not served, and for a missing key.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelFileError(
            f"GGUF architecture {architecture!r} is not served; known are {_names(GGUF_ARCHITECTURES)}"
        )

    def key(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelFileError(f"the GGUF file has no {architecture}.{name}")
        return value

    if key("expert_count", 0):
        raise ModelFileError("the GGUF file is a mixture of experts, which is not served")
    num_heads, hidden_size = key("attention.head_count"), key("embedding_length")
    head_dim = key("attention.key_length", hidden_size // num_heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if key(name, head_dim) != head_dim:
            raise ModelFileError(f"{architecture}.{name} is {key(name)}; only the head dim, {head_dim}, is served")
    eos_ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        num_layers=key("block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=key("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=key("feed_forward_length"),
        vocab_size=vocab_size,
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=key("rope.freq_base", 10_000.0),
        rope_scaling=_gguf_rope_scaling(key("rope.scaling.type", "none"), key("rope.scaling.factor", 1.0)),
        max_model_len=key("context_length"),
        tie_word_embeddings=tie_word_embeddings,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
    )


def hf_architecture(config: Mapping[str, Any]) -> str:
    """What config.json calls the model."""
    names = config.get("architectures")
    return str(names[0] if isinstance(names, list) and names else config.get("model_type", "unknown"))


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Config from config.json, with generation_config.json's end-of-sequence ids if there is one.

    Raises ModelFileError for an architecture or a feature that is not served, and for a missing key.
    """
    architecture = hf_architecture(config)
    if architecture not in HF_ARCHITECTURES:
        raise ModelFileError(f"architecture {architecture!r} is not served; known are {_names(HF_ARCHITECTURES)}")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name):
            raise ModelFileError(f"config.json sets {name}, which is not served")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"config.json has hidden_act {config['hidden_act']!r}; only 'silu' is served")

    def key(name: str) -> Any:
        if config.get(name) is None:
            raise ModelFileError(f"config.json has no {name}")
        return config[name]

    num_heads, hidden_size = key("num_attention_heads"), key("hidden_size")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return ModelConfig(
        architecture=HF_ARCHITECTURES[architecture],
        num_layers=key("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        intermediate_size=key("intermediate_size"),
        vocab_size=key("vocab_size"),
        rms_norm_eps=key("rms_norm_eps"),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        rope_scaling=_hf_rope_scaling(rope),
        max_model_len=key("max_position_embeddings"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_hf_eos_token_ids(config, generation or {}),
    )


def _gguf_rope_scaling(kind: str, factor: float) -> RopeScaling | None:
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    raise ModelFileError(f"rotary scaling {kind!r} is not served in GGUF; known are 'none' and 'linear'")


def _hf_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return RopeScaling("linear", rope["factor"])
        if kind == "llama3":
            return RopeScaling(
                "llama3",
                rope["factor"],
                rope["low_freq_factor"],
                rope["high_freq_factor"],
                rope["original_max_position_embeddings"],
            )
    except KeyError as error:
        raise ModelFileError(f"config.json's {kind} rotary scaling has no {error.args[0]}") from None
    raise ModelFileError(f"rotary scaling {kind!r} is not served; known are 'default', 'linear' and 'llama3'")


def _hf_eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (config, generation):
        value = source.get("eos_token_id")
        ids += [] if value is None else value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(ids))


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
