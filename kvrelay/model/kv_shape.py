"""How much KV a token adds, read from the config of a model that need not be one that kvrelay serves.

What is not understood well enough to count is refused, by name: a wrong plan is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelFileError
from kvrelay.gguf_metadata import read_header
from kvrelay.model.config import from_gguf, from_hf, hf_architecture
from kvrelay.model.hf_files import CONFIG_NAME, read_json

# What a number is called: in config.json, which differs by family, and last in GGUF, after the architecture's name.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "attention.head_count")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "attention.head_count_kv")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model", "embedding_length")
_HEAD_DIM = ("head_dim", "kv_channels", "attention.key_length")
_VALUE_DIM = ("v_head_dim", "attention.value_length")
_LATENT = ("kv_lora_rank", "attention.kv_lora_rank")
_LATENT_ROTARY = ("qk_rope_head_dim", "rope.dimension_count")
_WINDOW = ("sliding_window", "attention_chunk_size", "attention.sliding_window")
_MAX_LEN = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "context_length")

_MAX_LAYERS = 10_000  # each is looked at

_KINDS_WITH_KV = ("attention", "full_attention", "sliding_attention", "chunked_attention")
_KINDS_WITHOUT_KV = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
# How keys begin that say, each in a way of its own, that layers keep a state instead of KV, or keys of an index too.
_OWN_WAYS = (
    *("mamba", "ssm", "linear_", "hybrid_", "conv_", "wkv.", "shortconv.", "attn_layer", "attn_type_list"),
    *("attn_config", "block_types", "block_configs", "layers_block_type", "full_attention_interval", "full_attn_idxs"),
    *("index_", "compress_", "attention.indexer."),
)


@dataclass(frozen=True, slots=True)
class KVShape:
    architecture: str
    token_values: int  # numbers that one token adds to the cache, all layers together
    formula: str  # the same for people
    max_model_len: int  # token positions, prompt and answer together; 0: the config does not say
    unserved: str  # why kvrelay cannot serve the model; "": it can
    overcounted: str  # why an engine may keep less than is counted; "": it may not


def read_kv_shape(path: Path) -> KVShape:
    """Of a GGUF file or a Hugging Face directory, of which only config.json is read.

    Raises ModelFileError when there is none, or when it does not say how much KV there is.
    """
    if path.is_dir():
        return shape_from_hf(read_json(path / CONFIG_NAME))
    return shape_from_gguf(read_header(path).metadata)


def shape_from_hf(config: Mapping[str, Any]) -> KVShape:
    if config.get("is_encoder_decoder"):
        raise ModelFileError("config.json is of an encoder and a decoder, each with KV of its own; plan knows decoders")
    text = config.get("text_config")  # of a model that takes images or sound, too
    numbers = _Numbers(CONFIG_NAME, text if isinstance(text, Mapping) else config)
    return _shape(hf_architecture(config), numbers, lambda: from_hf(config))


def shape_from_gguf(metadata: Mapping[str, Any]) -> KVShape:
    """The metadata is what `read_header` gives."""
    architecture = str(metadata.get("general.architecture", "unknown"))
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    # What the keywords say comes from the tensors elsewhere, and changes nothing here.
    check = partial(from_gguf, metadata, vocab_size=1, tie_word_embeddings=False)
    return _shape(architecture, _Numbers("the GGUF file", own), check)


def _shape(architecture: str, numbers: _Numbers, check_served: Callable[[], object]) -> KVShape:
    """`check_served` raises ModelFileError, saying why, when kvrelay does not serve the model."""
    num_layers = numbers.count(_LAYERS)
    if num_layers > _MAX_LAYERS:
        raise ModelFileError(f"{numbers.source} has {num_layers} layers; at most {_MAX_LAYERS} are believed")
    kinds = numbers.layer_kinds(num_layers)
    kv_heads = _kv_heads_by_layer(numbers, num_layers, kinds)
    values, formula = _latents(numbers, len(kv_heads)) if numbers.has(_LATENT) else _heads(numbers, kv_heads)
    return KVShape(
        architecture=architecture,
        token_values=values,
        formula=formula,
        max_model_len=numbers.count(_MAX_LEN) if numbers.has(_MAX_LEN) else 0,
        unserved="its layers differ in what they keep" if numbers.layers_differ() else _why_unserved(check_served),
        overcounted=_overcounted(numbers, kinds),
    )


def _kv_heads_by_layer(numbers: _Numbers, num_layers: int, kinds: Sequence[str]) -> list[int]:
    """KV heads of each layer that keeps KV. Raises ModelFileError when none does, or which do is not known."""
    if numbers.layers_differ():
        kv_heads = [heads for heads in numbers.counts_by_layer(_KV_HEADS, num_layers) if heads]
    else:
        if not kinds:
            numbers.refuse_own_ways()
        num_kv_layers = sum(kind in _KINDS_WITH_KV for kind in kinds) if kinds else num_layers
        kv_heads = [_num_kv_heads(numbers)] * num_kv_layers
    if not kv_heads:
        raise ModelFileError(f"no layer of the model keeps KV, says {numbers.source}: there is none to plan for")
    return kv_heads


def _num_kv_heads(numbers: _Numbers) -> int:
    # Falcon's: one head where this is set, whatever else it says, but for its newer models.
    if numbers.flag("multi_query") and not numbers.flag("new_decoder_architecture"):
        return 1
    return numbers.count(_KV_HEADS if numbers.has(_KV_HEADS) else _HEADS)


def _heads(numbers: _Numbers, kv_heads: Sequence[int]) -> tuple[int, str]:
    """Values of a token and how they come about."""
    key_dim = numbers.count(_HEAD_DIM) if numbers.has(_HEAD_DIM) else _divided_head_dim(numbers)
    value_dim = numbers.count(_VALUE_DIM) if numbers.has(_VALUE_DIM) else key_dim
    if len(set(kv_heads)) == 1:
        heads = f"{len(kv_heads)} layers x {kv_heads[0]} KV heads"
    else:
        heads = f"{sum(kv_heads)} KV heads in {len(kv_heads)} layers"
    return sum(kv_heads) * (key_dim + value_dim), f"{heads} x ({key_dim} + {value_dim})"


def _divided_head_dim(numbers: _Numbers) -> int:
    hidden_size, num_heads = numbers.count(_HIDDEN_SIZE), numbers.count(_HEADS)
    if hidden_size < num_heads:
        raise ModelFileError(f"{numbers.source} divides a hidden size of {hidden_size} among {num_heads} heads")
    return hidden_size // num_heads


def _latents(numbers: _Numbers, num_layers: int) -> tuple[int, str]:
    """Likewise, where all heads share one latent (multi-head latent attention: DeepSeek-V2, arXiv 2405.04434)."""
    latent, rotary = numbers.count(_LATENT), numbers.count(_LATENT_ROTARY)
    return num_layers * (latent + rotary), f"{num_layers} layers x one latent x ({latent} + {rotary})"


def _why_unserved(check_served: Callable[[], object]) -> str:
    try:
        check_served()
    except ModelFileError as error:
        return error.message
    return ""


def _overcounted(numbers: _Numbers, kinds: Sequence[str]) -> str:
    if numbers.has(("num_kv_shared_layers",)):
        return "some layers share their KV, and are counted as if none did"
    windows = numbers.has(_WINDOW) and numbers.values.get("use_sliding_window") is not False
    if windows or {"sliding_attention", "chunked_attention"} & set(kinds):
        return "some layers attend to a window only, and are counted in full"
    return ""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A config's values by any of their names. Every method raises ModelFileError for what is missing or no count."""

    source: str
    values: Mapping[str, Any]

    def has(self, names: Sequence[str]) -> bool:
        return any(self.flag(name) for name in names)

    def flag(self, name: str) -> bool:
        """Whether there is anything but null, false, 0 or nothing."""
        return bool(self.values.get(name))

    def count(self, names: Sequence[str]) -> int:
        name, value = self._find(names)
        if not _is_count(value, 1):
            raise ModelFileError(f"{self.source} has {name} {value!r}; a whole number of at least 1 was expected")
        return int(value)

    def layers_differ(self) -> bool:
        """Whether KV heads are told layer by layer."""
        return self.has(_KV_HEADS) and isinstance(self._find(_KV_HEADS)[1], list)

    def counts_by_layer(self, names: Sequence[str], num_layers: int) -> list[int]:
        name, value = self._find(names)
        if len(value) != num_layers or not all(_is_count(count, 0) for count in value):
            raise ModelFileError(f"{self.source} has {name} {value!r}; {num_layers} whole numbers were expected")
        return [int(count) for count in value]

    def layer_kinds(self, num_layers: int) -> list[str]:
        """The kind of each layer; none if they are not listed."""
        listed = self.values.get("layer_types") or []
        if not isinstance(listed, list):
            raise ModelFileError(f"{self.source} has layer_types {listed!r}; a list was expected")
        kinds = [str(kind) for kind in listed]
        unknown = [kind for kind in kinds if kind not in _KINDS_WITH_KV + _KINDS_WITHOUT_KV]
        if unknown:
            known = ", ".join(_KINDS_WITH_KV + _KINDS_WITHOUT_KV)
            raise ModelFileError(f"{self.source} has layers of kind {unknown[0]}; plan knows {known}")
        if kinds and len(kinds) != num_layers:
            raise ModelFileError(f"{self.source} lists the kinds of {len(kinds)} layers, and has {num_layers}")
        return kinds

    def refuse_own_ways(self) -> None:
        for key in sorted(self.values):
            if key.startswith(_OWN_WAYS) and self.flag(key):
                raise ModelFileError(
                    f"{self.source} has {key}: not every layer keeps KV and nothing else, and plan does not know how "
                    "much that is; it reads models with attention in every layer, or whose layer_types names each"
                )

    def _find(self, names: Sequence[str]) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name) is not None:
                return name, self.values[name]
        raise ModelFileError(f"{self.source} has none of {', '.join(names)}; is it the config of a language model?")


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
