"""What nodes ask of a store of KV blocks, whichever kind it is; and how a store that fails is left alone."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from kvrelay.kv.chain import Chain, ChainBlock
from kvrelay.kv.circuit import Circuit
from kvrelay.kv.hashing import Buffer
from kvrelay.types import BlockHash, Tier

logger = logging.getLogger(__name__)


class BlockStore(Protocol):
    """Never raises for what the store does: a store that is gone, slow or wrong is a miss.

    `chain` says whose blocks they are and which of several stores has them; a single store does without.
    `num_failures` counts calls that failed, `num_corrupt` blocks that arrived and were not what was asked for.
    """

    @property
    def num_failures(self) -> int: ...

    @property
    def num_corrupt(self) -> int: ...

    @property
    def is_blocked(self) -> bool:
        """Whether it failed lately and would not be asked now."""

    async def match(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[Tier]:
        """Tiers of the longest prefix of `hashes` that it holds."""

    async def missing(self, hashes: Sequence[BlockHash], chain: Chain | None = None) -> list[BlockHash]:
        """Those it does not hold; [] on failure, so that nothing is sent to a store that is not there."""

    def get(
        self, hashes: Sequence[BlockHash], chain: Chain | None = None
    ) -> AsyncGenerator[tuple[BlockHash, Buffer, Tier], None]:
        """Proven slabs in the order asked for, each valid until the next is asked for; ends early at the first that
        the store cannot give. Close it (contextlib.aclosing) when leaving it early."""

    async def put(self, slabs: Sequence[tuple[BlockHash, bytes]], places: Sequence[ChainBlock] = ()) -> int:
        """Sends slabs; how many the store did not have. `places` are theirs in one chain, parents first, or none."""

    def stalled(self, chain: Chain | None = None) -> None:
        """Whoever waited for the first answer to a `match` or `get` gave up: it counts as a failure."""

    async def close(self) -> None: ...


class StoreHealth:
    """Counts what a store did wrong, and opens a circuit, so that a dead one costs no time; logged once per opening."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self.num_failures = 0
        self.num_corrupt = 0
        self._name = name
        self._timeout_s = timeout_s
        self._circuit = Circuit()

    @property
    def is_blocked(self) -> bool:
        return self._circuit.blocks(time.monotonic())

    def stalled(self, chain: Chain | None = None) -> None:
        self._failed(TimeoutError("it gave nothing in the time that computing took"))

    def _allowed(self) -> bool:
        return self._circuit.allows(time.monotonic())

    def _succeeded(self) -> None:
        if self._circuit.is_open:
            logger.info("%s answers again", self._name)
        self._circuit.succeeded()

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if self._circuit.failed(time.monotonic()):
            what = str(error) or f"no answer within {self._timeout_s:g} s"
            logger.warning("%s is left alone for a while: %s", self._name, what)
