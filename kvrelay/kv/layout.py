"""How KV lies in memory and on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import InvalidRequestError
from kvrelay.kv.hashing import Buffer, hash_fields

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
AXES = "layer,kv,token,head,dim"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one block's slab: the same contiguous bytes on the device, on the wire and in the store.

    Raises InvalidRequestError for a count under 1 or a dtype that is not served.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of ITEM_BYTES
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            count = getattr(self, name)
            if not 1 <= count < 2**31:
                raise InvalidRequestError(f"KV layout: {name} is {count}; allowed is [1, 2147483647]")
        if self.dtype not in ITEM_BYTES:
            raise InvalidRequestError(f"KV layout: dtype is {self.dtype!r}; allowed are {', '.join(ITEM_BYTES)}")

    @property
    def axes(self) -> str:
        """Order of a slab's axes, outermost first."""
        return AXES

    @property
    def slab_shape(self) -> tuple[int, int, int, int, int]:
        """[num_layers, 2 (K, V), block_tokens, num_kv_heads, head_dim]"""
        return (self.num_layers, 2, self.block_tokens, self.num_kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def slab_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 that two layouts share only if their slabs can be exchanged as bytes."""
        counts = (self.num_layers, self.num_kv_heads, self.head_dim, self.block_tokens)
        fields = [str(count).encode() for count in counts]
        return hash_fields(b"kvrelay-layout-v1", self.axes.encode(), self.dtype.encode(), *fields).hex()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions, the last one perhaps in part."""
        return -(-num_tokens // self.block_tokens)

    def without_rest(self, payload: Buffer, num_tokens: int, offset_bytes: int = 0) -> bytearray:
        """A copy of a slab, or of its part from `offset_bytes` on, with zeros from position `num_tokens` on, where an
        earlier owner's KV may still lie."""
        row_bytes = self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]  # K or V of one token in one layer
        run_bytes = row_bytes * self.block_tokens  # K or V of all tokens in one layer
        cleared = bytearray(payload)
        for run in range(-(offset_bytes % run_bytes), len(cleared), run_bytes):  # where each begins in the payload
            start, end = max(0, run + row_bytes * num_tokens), min(len(cleared), run + run_bytes)
            cleared[start:end] = bytes(max(0, end - start))
        return cleared
