"""The way of a preempted request's blocks back from the kvstore."""

from __future__ import annotations

from collections.abc import Callable

from decode_node.engine import BlocksWanted, Cache, DecodeCore
from decode_node.metrics import DecodeMetrics
from kvrelay.engine.loop import EngineLoop
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.prefix import load_prefix

LOAD_LIMIT_S = 1.0  # longest wait for one request's blocks; what has not come by then is computed


class BlockLoader:
    """Belongs to the event loop."""

    def __init__(
        self,
        engine: EngineLoop[DecodeCore],
        cache: Cache,
        store: BlockStore,
        metrics: DecodeMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._store = store
        self._metrics = metrics
        self._clock = clock

    async def load(self, wanted: BlocksWanted) -> None:
        """Fills the blocks as far as the store can and tells the engine. Once it has ended, by a cancel too, nothing
        writes into them any more."""
        started = self._clock()
        tiers = await load_prefix(
            self._store, wanted.chain, wanted.hashes, wanted.block_ids, self._cache.write_slab, LOAD_LIMIT_S
        )
        self._metrics.blocks_loaded(tiers)
        seconds = self._clock() - started
        await self._engine.call(lambda core: core.loaded(wanted.reservation_id, len(tiers), seconds))
