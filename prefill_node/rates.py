"""How fast this node computes prompts, hands their KV over and loads it. Pure; belongs to the event loop."""

from __future__ import annotations

from kvrelay.cluster import NodeRates
from kvrelay.rates import HALF_BYTES, HALF_TOKENS, WorkRate


class PrefillRates:
    """Of all links to decode nodes together, and of all kvstores."""

    def __init__(self) -> None:
        self._prompts = WorkRate(HALF_TOKENS)
        self._links = WorkRate(HALF_BYTES)
        self._store = WorkRate(HALF_BYTES)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step of the engine."""
        self._prompts.add(num_tokens, seconds)

    def carried(self, num_bytes: int, seconds: float) -> None:
        """A link carried so much, by what its answers tell; an idle link's time is not in it."""
        self._links.add(num_bytes, seconds)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """So much came from kvstores."""
        self._store.add(num_bytes, seconds)

    def rates(self) -> NodeRates:
        return NodeRates(
            prefill_tokens_per_s=self._prompts.per_s,
            handoff_bytes_per_s=self._links.per_s,
            store_bytes_per_s=self._store.per_s,
        )
