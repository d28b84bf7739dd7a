"""Which blocks an administrator means."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selector:
    """A block is meant when it matches every field that is set."""

    tenant: str = ""  # whose blocks
    namespace: bytes = b""  # what its key begins with: a namespace_key, or a model_key for every layout of a model
    block_hash: bytes = b""  # this block and all that follow it in their chains, in every namespace meant
    unused_s: float | None = None  # not used for longer than this
