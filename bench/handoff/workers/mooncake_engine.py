"""Mooncake's transfer engine over TCP: a handoff's slabs are one batch of synchronous writes. No checksums."""

from __future__ import annotations

import ctypes

from mooncake.engine import TransferEngine

from bench.handoff.conversation import Conversation
from bench.handoff.transfers import allocate, measure


def main() -> None:
    driver = Conversation()
    num_bytes = driver.task["num_bytes"]
    memory = allocate(num_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = TransferEngine()
    _check(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), "initialize")
    _check(engine.register_memory(address, num_bytes), "register_memory")
    if "port" not in driver.task:
        driver.tell(port=engine.get_rpc_port(), address=address)
        driver.next_order()
        return
    slab_bytes = driver.task["slab_bytes"]
    starts = range(0, num_bytes, slab_bytes)
    ours = [address + start for start in starts]
    theirs = [driver.task["address"] + start for start in starts]
    target, lengths = f"127.0.0.1:{driver.task['port']}", [slab_bytes] * len(starts)

    def transfer() -> int:
        _check(engine.batch_transfer_sync_write(target, ours, theirs, lengths), "batch_transfer_sync_write")
        return num_bytes

    driver.tell(ready=True)
    while order := driver.next_order():
        driver.tell(**measure(transfer, driver.task["peer_pid"], order["seconds"]))


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} gives {status}")


if __name__ == "__main__":
    main()
