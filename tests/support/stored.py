"""What a real cluster's kvstore has of an answer, as its administrator sees it."""

from __future__ import annotations

import asyncio

from kvrelay.inference import RequestFinished
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.types import BlockHash
from tests.support.cluster import RoleProcess

STORED_S = 60.0  # blocks leave the nodes in the background, when nothing else is to be done


async def stored_hashes(store: RoleProcess) -> set[BlockHash]:
    async with StoreAdmin(store.address) as admin:
        return {block.block_hash async for block in admin.list()}


async def until_stored(store: RoleProcess, finished: RequestFinished) -> None:
    """Until the store has the prompt's last full block, and so all before it."""
    async with asyncio.timeout(STORED_S):
        while finished.prefix_hash not in await stored_hashes(store):
            await asyncio.sleep(0.05)
