"""Makes the store that a node is configured with."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.address import REDIS_SCHEME
from kvrelay.kv.block_store import BlockStore
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.redis_store import RedisStore
from kvrelay.kv.remote import StoreClient
from kvrelay.kv.stores import Stores
from kvrelay.rpc.credentials import ChannelTLS


def open_store(
    addresses: Sequence[str],
    num_replicas: int,
    layout: KVLayout,
    model_fingerprint: str,
    tls: ChannelTLS | None = None,
) -> BlockStore:
    """One store, or several as one; `addresses` are host:port of a kvstore, which is dialled with `tls`, or
    redis://host:port, which is not.

    Connects to nothing yet. Raises ConfigError if a Redis is wanted and its client is not installed.
    """
    stores: dict[str, BlockStore] = {}
    for address in addresses:
        if address.startswith(REDIS_SCHEME):
            stores[address] = RedisStore(address, layout, model_fingerprint)
        else:
            stores[address] = StoreClient(address, layout, model_fingerprint, tls=tls)
    return stores[addresses[0]] if len(stores) == 1 else Stores(stores, num_replicas)
