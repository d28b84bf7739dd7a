"""Makes the store that a node is configured with."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.config import REDIS_SCHEME
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.redis_store import RedisStore
from kvrelay.kv.remote import StoreClient
from kvrelay.kv.stores import Stores


def open_store(addresses: Sequence[str], num_replicas: int, layout: KVLayout, model_fingerprint: str) -> BlockStore:
    """One store, or several as one; `addresses` are host:port of a kvstore, or redis://host:port.

    Connects to nothing yet. Raises ConfigError if a Redis is wanted and its client is not installed.
    """
    stores: dict[str, BlockStore] = {}
    for address in addresses:
        kind = RedisStore if address.startswith(REDIS_SCHEME) else StoreClient
        stores[address] = kind(address, layout, model_fingerprint)
    return stores[addresses[0]] if len(stores) == 1 else Stores(stores, num_replicas)
