"""What of a sequence is not computed again: blocks of the node's own pool, then blocks of the kvstore.

The pool pins its part when blocks are set aside. `load_prefix` asks the store for the rest and waits for it, as a
decode node does for a request that comes back; a prefill node computes meanwhile (`prefill_node.loading`). Whatever
does not come, or comes damaged, is computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing

from kvrelay.errors import CorruptBlockError, KVRelayError
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.chain import Chain
from kvrelay.kv.hashing import Buffer
from kvrelay.types import BlockHash, BlockId, CachedTokens, Tier

logger = logging.getLogger(__name__)


def count_cached(num_device_blocks: int, store_tiers: Sequence[Tier], block_tokens: int) -> CachedTokens:
    """Tokens by tier, of blocks pinned in the pool and of blocks loaded from the store."""
    return CachedTokens(
        device=num_device_blocks * block_tokens,
        memory=store_tiers.count(Tier.MEMORY) * block_tokens,
        disk=store_tiers.count(Tier.DISK) * block_tokens,
    )


async def load_prefix(
    store: BlockStore,
    chain: Chain,
    hashes: Sequence[BlockHash],
    block_ids: Sequence[BlockId],
    write_slab: Callable[[BlockId, Buffer], None],
    limit_s: float,
) -> list[Tier]:
    """Writes the store's slabs of `hashes` into `block_ids`, in order, up to the first that does not come right.

    Returns the tiers of the blocks that were written within `limit_s`. Writes only between its own awaits: once this
    coroutine has ended, by a cancel too, the blocks may be given away.
    """
    tiers: list[Tier] = []
    try:
        async with asyncio.timeout(limit_s), aclosing(store.get(hashes, chain)) as slabs:
            async for block_hash, slab, tier in slabs:
                if len(tiers) == len(hashes) or block_hash != hashes[len(tiers)]:
                    raise CorruptBlockError("the kvstore sent a block that was not asked for")
                write_slab(block_ids[len(tiers)], slab)
                tiers.append(tier)
    except (KVRelayError, TimeoutError) as error:
        why = str(error) or f"the kvstore took longer than {limit_s:g} s"
        logger.warning(
            "%d of %d blocks of a prefix were loaded, the rest is computed: %s", len(tiers), len(hashes), why
        )
    return tiers
