"""What is handed over: the KV of a model's blocks, at the demo model's shape and at an 8B model's."""

from __future__ import annotations

from pathlib import Path

from kvrelay.cluster import ModelInfo
from kvrelay.kv.layout import KVLayout

BLOCK_TOKENS = 16
VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 2**20

# Without a model: only the layout matters to what moves the bytes.
LAYOUTS = {
    "135M": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=BLOCK_TOKENS),
    "8B": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=BLOCK_TOKENS),
}
HANDOFF_BYTES = 144 * 2**20  # of one handoff: as of 6,500 tokens of the first, 1,150 of the second


def info_of(shape: str) -> ModelInfo:
    """`shape` is a key of LAYOUTS, or the path of a model's file, which both sides then pretend to serve."""
    if shape in LAYOUTS:
        layout = LAYOUTS[shape]
        return ModelInfo(
            *(shape, "00" * 32, "llama", MAX_MODEL_LEN, VOCAB_SIZE, (2,), layout, layout.dtype, "none"),
        )
    # Only a worker that was given a model needs torch for its config.
    from kvrelay.model.fingerprint import model_fingerprint
    from kvrelay.model.weights import open_weights

    path = Path(shape)
    config = open_weights(path).config
    layout = config.layout("bfloat16", BLOCK_TOKENS)
    return ModelInfo(
        name=path.stem,
        fingerprint=model_fingerprint(path),
        architecture=config.architecture,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        layout=layout,
        dtype=layout.dtype,
        attention_backend="none",
    )


def num_blocks_of(shape: str) -> int:
    """Of one handoff of about HANDOFF_BYTES."""
    return HANDOFF_BYTES // LAYOUTS[shape].slab_bytes


def column_of(shape: str) -> str:
    """As a table's column: `135M, 360 KiB a block`."""
    return f"{shape}, {LAYOUTS[shape].slab_bytes // 1024:,} KiB a block"
