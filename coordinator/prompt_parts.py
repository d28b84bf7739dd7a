"""What a prefill node computes of a prompt and what it loads from the kvstore, as far as a coordinator can tell. Pure.

A node loads from the last block to the first while its engine computes from the first on, until the two meet; and it
loads while others' prompts are computed. So a slow store costs a request next to nothing, and a fast one spares it
nearly all that is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.node_load import NodeLoad
from coordinator.work import Work


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Of one prompt, in tokens that the node does not have cached."""

    num_rest: float  # that nobody has
    num_stored: float  # that the store has, as is expected
    token_s: float  # to compute one
    load_token_s: float  # to load one; 0 where nothing is stored

    @property
    def num_computed(self) -> float:
        """By the engine, those among the stored ones that it comes to first included."""
        return self.num_rest + self.num_stored * self._share_computed

    @property
    def rest_s(self) -> float:
        """To compute what nobody has."""
        return self.num_rest * self.token_s

    def load_s(self, queue_s: float) -> float:
        """Until the stored ones are there, beyond the time in which the engine is busy with others."""
        if not self.num_stored:
            return 0.0
        num_left = max(0.0, self.num_stored - queue_s / self.load_token_s)
        return num_left * self._share_computed * self.token_s

    @property
    def _share_computed(self) -> float:
        """Of tokens that are loaded from one end and computed from the other."""
        both_s = self.load_token_s + self.token_s
        return self.load_token_s / both_s if both_s else 0.0


def parts_of(work: Work, node: NodeLoad, num_cached_blocks: int, token_s: float) -> PromptParts:
    """Of a prompt of which `node` has so many leading blocks. A node that never loaded anything is taken for one that
    has no store."""
    num_uncached = work.num_uncached(num_cached_blocks)
    num_stored = work.num_stored_tokens(num_cached_blocks) if node.store_byte_s else 0.0
    load_token_s = work.block_bytes / work.block_tokens * node.store_byte_s
    return PromptParts(num_uncached - num_stored, num_stored, token_s, load_token_s)
