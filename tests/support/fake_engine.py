"""Stand-ins for what needs torch: a runner that draws by rule, a cache of plain bytes, a prompt's slabs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvrelay.cluster import ModelInfo
from kvrelay.engine.batch import Batch, build
from kvrelay.errors import BadLogitsError, CorruptBlockError
from kvrelay.kv.hashing import Buffer
from kvrelay.kv.layout import KVLayout
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockId, RequestId

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=4)
EOS = 2


def make_info(layout: KVLayout = LAYOUT, **changes: object) -> ModelInfo:
    fields: dict[str, object] = {
        "name": "fake",
        "fingerprint": "ab" * 32,
        "architecture": "llama",
        "max_model_len": 64,
        "vocab_size": 100,
        "eos_token_ids": (EOS,),
        "layout": layout,
        "dtype": layout.dtype,
        "attention_backend": "fake",
    }
    return ModelInfo(**(fields | changes))  # type: ignore[arg-type]


def make_request(
    token_ids: tuple[int, ...], max_tokens: int = 8, *, num_prompt_tokens: int | None = None, **sampling: object
) -> NodeRequest:
    params = {"temperature": 0.0, "seed": 0, "max_tokens": max_tokens} | sampling
    return NodeRequest(
        request_id=RequestId("request"),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


class FakeCache:
    """Slabs as bytes."""

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        self.layout = layout
        self.slabs: dict[BlockId, bytes] = {}

    def read_slab(self, block_id: BlockId) -> bytes:
        return self.slabs.get(block_id, bytes(self.layout.slab_bytes))

    def copy_block(self, source: BlockId, target: BlockId) -> None:
        self.slabs[target] = self.read_slab(source)

    def write_slab(self, block_id: BlockId, payload: Buffer) -> None:
        if len(payload) != self.layout.slab_bytes:
            raise CorruptBlockError(f"{len(payload)} bytes are no slab")
        self.slabs[block_id] = bytes(payload)

    def write_part(self, block_id: BlockId, payload: Buffer, offset_bytes: int) -> None:
        slab, end = self.read_slab(block_id), offset_bytes + len(payload)
        self.write_slab(block_id, slab[:offset_bytes] + bytes(payload) + slab[end:])


class FakeRunner:
    """Draws `last token + 1` (wrapping inside [10, 90), so never an EOS); checks each batch's layout by building it.

    `before_step` runs first in each step and may raise or block. A row whose last token is in `bad_after` gets bad
    logits.
    """

    def __init__(self, block_tokens: int = LAYOUT.block_tokens) -> None:
        self.block_tokens = block_tokens
        self.batches: list[list[int]] = []  # tokens of each row, by step
        self.before_step: Callable[[], None] = lambda: None
        self.bad_after: set[int] = set()

    def run(self, batch: Batch) -> list[GeneratedToken | BadLogitsError | None]:
        self.before_step()
        build(batch, self.block_tokens)
        self.batches.append([row.num_tokens for row in batch.rows])
        return [self._drawn(row.sequence.token_ids[-1]) if row.yields_token else None for row in batch.rows]

    def _drawn(self, last: int) -> GeneratedToken | BadLogitsError:
        return BadLogitsError(f"NaN after {last}") if last in self.bad_after else GeneratedToken(next_token(last))


def next_token(token_id: int) -> int:
    return 10 + (token_id + 1 - 10) % 80


def slab_of(block_index: int, layout: KVLayout = LAYOUT) -> bytes:
    """Some bytes of the right length, different for each block."""
    return hashlib.shake_128(f"slab {block_index}".encode()).digest(layout.slab_bytes)
