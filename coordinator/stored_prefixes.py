"""How much of a prompt the kvstore probably has. Pure.

A coordinator does not see into stores. But nodes keep there what they computed, and tell which blocks they have and
had: so a block that some node has, or gave up, may be in the store. How much of what may be there really comes is seen
by what prefill nodes say they loaded, tenant by tenant, since stores keep more of some tenants' than of others'. While
nothing ever came, as without a store, nothing is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from coordinator.holders import keys_of
from coordinator.last_heard import LastHeard
from kvrelay.types import BlockHash

HALF_TOKENS = 16_384  # expected before the last so many count half
_MAX_TENANTS = 1_000  # whose chances are remembered


class _Share:
    """Tokens of one tenant, the later ones counted more: those that may have been stored, and those that came."""

    __slots__ = ("came", "expected")

    def __init__(self) -> None:
        self.came = self.expected = 0.0

    def add(self, num_expected: int, num_came: int) -> None:
        kept = 0.5 ** (num_expected / HALF_TOKENS)
        self.came = kept * self.came + num_came
        self.expected = kept * self.expected + num_expected


class StoredPrefixes:
    """Of one model. `held` says of a block's key whether some node has it; `max_blocks` bounds those that none has."""

    def __init__(self, held: Callable[[int], bool], max_blocks: int) -> None:
        self._held = held
        self._max_blocks = max_blocks
        self._given_up: dict[int, None] = {}  # the longest ago first
        self._shares = LastHeard(_Share, _MAX_TENANTS)

    def given_up(self, keys: Iterable[int]) -> None:
        """A node has these no more."""
        for key in keys:
            self._given_up.pop(key, None)
            self._given_up[key] = None
        num_over = len(self._given_up) - self._max_blocks
        for key in list(islice(self._given_up, max(0, num_over))):
            del self._given_up[key]

    def num_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Leading blocks that nodes have or had, and may have kept."""
        for count, key in enumerate(keys_of(hashes)):
            if key not in self._given_up and not self._held(key):
                return count
        return len(hashes)

    def chance(self, tenant: str) -> float:
        """The part of its blocks that nodes had which comes from the store; 0 while none did."""
        share = self._shares.get(tenant)
        return share.came / share.expected if share is not None and share.came else 0.0

    def loaded(self, tenant: str, num_expected: int, num_tokens: int) -> None:
        """A prefill node lacked `num_expected` tokens which may have been in the store; so many came from there."""
        num_expected = max(num_expected, num_tokens)
        if num_expected == 0:
            return
        self._shares.of(tenant).add(num_expected, num_tokens)
