"""What the store keeps: a slab, the checksum that proves it, a key that names its namespace, and whose it is."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import CorruptBlockError, InvalidRequestError
from kvrelay.kv.hashing import HASH_BYTES, Buffer, hash_fields, slab_checksum

MODEL_BYTES = 8
NAMESPACE_BYTES = 16
KEY_BYTES = NAMESPACE_BYTES + HASH_BYTES
MAX_FINGERPRINT_CHARS = 128
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What is known of a stored block besides its bytes."""

    key: bytes  # namespace_key + block hash
    parent: bytes  # key of the block before it; namespace_key + the chain's root for a first block
    chain_index: int  # place in its chain; 0 for a first block
    tenant: str  # whose quota it counts against; DEFAULT_TENANT where nobody was named
    ttl_s: float  # how long it stays after its last use; 0: no end but eviction


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """`payload` may be a view: of the message it came in, of the memory tier, or of a page of LMDB."""

    payload: Buffer
    checksum: bytes  # xxh3_128 of the payload, made by whoever computed the block

    @property
    def num_bytes(self) -> int:
        return len(self.payload)

    def verify(self) -> None:
        """Raises CorruptBlockError unless the payload is what the checksum was made of."""
        if slab_checksum(self.payload) != self.checksum:
            raise CorruptBlockError(f"slab of {self.num_bytes} bytes fails its checksum")


def model_key(model_fingerprint: str) -> bytes:
    """8 bytes that the namespaces of one model begin with, in whatever layout. Raises InvalidRequestError."""
    _check_fingerprint("model", model_fingerprint)
    return hash_fields(b"kvrelay-store-model-v1", model_fingerprint.encode())[:MODEL_BYTES]


def namespace_key(model_fingerprint: str, layout_fingerprint: str) -> bytes:
    """16 bytes that separate the blocks of one model and layout from all others: the model's key, then the layout's.

    They separate, but prove nothing: model and layout are in the block hash too. Raises InvalidRequestError.
    """
    model = model_key(model_fingerprint)
    _check_fingerprint("layout", layout_fingerprint)
    layout = hash_fields(b"kvrelay-store-layout-v1", layout_fingerprint.encode())
    return model + layout[: NAMESPACE_BYTES - MODEL_BYTES]


def _check_fingerprint(name: str, value: str) -> None:
    if not 1 <= len(value) <= MAX_FINGERPRINT_CHARS:
        raise InvalidRequestError(
            f"{name}_fingerprint has {len(value)} characters; allowed is [1, {MAX_FINGERPRINT_CHARS}]"
        )
