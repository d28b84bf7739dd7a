"""One end of a handoff in a process of its own, which says how many bytes it copied meanwhile.

`receive SLAB`: prints its address, then a count for each line on stdin. `send SLAB ADDRESS`: hands over once and prints
the bytes of the slabs and of its copies. Run with count.c preloaded.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import time

from kvrelay.engine.sequence import Sequence
from kvrelay.kv.cache import PagedKVCache
from kvrelay.kv.hashing import chain_root
from kvrelay.kv.layout import KVLayout
from kvrelay.messages import HandoffTarget
from kvrelay.rpc import raw
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockId
from prefill_node.engine import Admitted, Computed
from prefill_node.progress import Progress
from prefill_node.scheduler import JobId
from prefill_node.sender import HandoffSender
from prefill_node.turns import Turns
from tests.support.decode_harness import decode_node
from tests.support.fake_engine import make_info, make_request

LAYOUTS = {
    "360KiB": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"),  # the demo model's
    "2MiB": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),  # of a model of 8B parameters
}
LAYOUT = LAYOUTS[sys.argv[2]]
NUM_BLOCKS = 43_200 * 1024 // LAYOUT.slab_bytes
NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_tokens
INFO = make_info(LAYOUT, max_model_len=NUM_TOKENS + 1)


def copied_bytes() -> int:
    count = ctypes.CDLL(None).copied_bytes
    count.restype = ctypes.c_ulonglong
    return int(count())


def tell(*what: object) -> None:
    sys.stdout.write(" ".join(map(str, what)) + "\n")
    sys.stdout.flush()


async def receive() -> None:
    cache = PagedKVCache(LAYOUT, NUM_BLOCKS + 1)
    async with decode_node(info=INFO, cache=cache, num_blocks=NUM_BLOCKS + 1) as harness:
        tell(harness.address)
        while await asyncio.to_thread(sys.stdin.readline):
            tell(copied_bytes())


async def send(address: str) -> None:
    request = make_request(tuple(i % 90 for i in range(NUM_TOKENS)), max_tokens=1)
    sequence = Sequence.create(request, chain_root(INFO.fingerprint, LAYOUT.fingerprint, b""), LAYOUT.block_tokens)
    progress = Progress()
    progress.take(Admitted(JobId(1), tuple(BlockId(i) for i in range(NUM_BLOCKS)), 0), time.monotonic())
    progress.take(Computed(JobId(1), NUM_TOKENS, GeneratedToken(20)), time.monotonic())
    cache = PagedKVCache(LAYOUT, NUM_BLOCKS)
    async with open_channel(address, own_connection=True) as channel:
        client = DecodeClient(channel)
        granted = await client.reserve(request, NUM_TOKENS + 1, 10.0)
        target = HandoffTarget(address, granted.instance_id, granted.reservation_id, 1, 0)
        call = raw.stream_stream(channel, raw.KV_TRANSFER, "Receive")()
        sender = HandoffSender(
            call, Turns(LAYOUT.slab_bytes), target, INFO, sequence, progress, cache.view_slabs, stall_s=10.0
        )
        before = copied_bytes()
        report = await sender.send()
        tell(report.num_bytes, copied_bytes() - before)
        await client.release(granted.reservation_id)


if __name__ == "__main__":
    asyncio.run(receive() if sys.argv[1] == "receive" else send(sys.argv[3]))
