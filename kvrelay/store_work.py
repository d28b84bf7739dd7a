"""`kvrelay store verify`, `compact`, `evict` and `pin`: work that a store does while it serves."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from kvrelay.client_command import size, write
from kvrelay.duration import show_duration
from kvrelay.errors import NotFoundError
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.kv.store_messages import BlockSelection, DeleteReply, WorkReport
from kvrelay.progress_bar import ProgressBar
from kvrelay.store_targets import ask_each, find_block, model_fingerprint, served_namespace, store_addresses
from kvrelay.types import BlockHash

T = TypeVar("T")


async def verify(options: argparse.Namespace) -> None:
    def told(work: WorkReport) -> str:
        return f"{work.num_done:,} blocks on disk read, {work.num_corrupt:,} corrupt and dropped"

    def described(work: WorkReport) -> dict[str, int]:
        return {"num_blocks": work.num_done, "num_corrupt": work.num_corrupt}

    await _work(options, "verify", "block", StoreAdmin.verify, told, described)


async def compact(options: argparse.Namespace) -> None:
    def told(work: WorkReport) -> str:
        return f"the file is {size(work.num_freed_bytes)} smaller"

    def described(work: WorkReport) -> dict[str, int]:
        return {"num_freed_bytes": work.num_freed_bytes}

    await _work(options, "compact", "step", StoreAdmin.compact, told, described)


async def evict(options: argparse.Namespace) -> None:
    addresses = await store_addresses(options)
    selection = BlockSelection(
        tenant=options.tenant,
        model_fingerprint=await model_fingerprint(options),
        block_hash=await find_block(addresses, options.prefix) if options.prefix else b"",
        unused_s=options.older_than,
    )

    def told(dropped: DeleteReply) -> str:
        return f"{dropped.num_blocks:,} blocks dropped, {size(dropped.num_bytes)}"

    await _tell_each(options, addresses, lambda admin: admin.delete(selection), told, asdict)


async def pin(options: argparse.Namespace) -> None:
    pin_s = options.duration
    addresses = await store_addresses(options)
    namespace = await served_namespace(options)
    block_hash = BlockHash(await find_block(addresses, options.prefix))
    pinned = await _tell_each(
        options,
        addresses,
        lambda admin: admin.pin(namespace, [block_hash], pin_s),
        lambda num: "not held here" if not num else f"pinned for {show_duration(pin_s)}" if pin_s else "not pinned now",
        lambda num: {"held": bool(num), "pin_s": pin_s},
    )
    if not any(pinned.values()):
        raise NotFoundError(f"no store holds {options.prefix} for the model that is served")


async def _work(
    options: argparse.Namespace,
    title: str,
    unit: str,
    begin: Callable[[StoreAdmin], AsyncGenerator[WorkReport, None]],
    told: Callable[[WorkReport], str],
    described: Callable[[WorkReport], dict[str, int]],
) -> None:
    async def run(admin: StoreAdmin) -> WorkReport:
        last = WorkReport(0, 0)
        with ProgressBar(f"{title} {admin.address}", unit) as bar:
            async with aclosing(begin(admin)) as works:
                async for last in works:
                    bar.show(last.num_done, last.num_total)
        return last

    await _tell_each(options, await store_addresses(options), run, told, described)


async def _tell_each(
    options: argparse.Namespace,
    addresses: Sequence[str],
    ask: Callable[[StoreAdmin], Awaitable[T]],
    told: Callable[[T], str],
    described: Callable[[T], dict[str, Any]],
) -> Mapping[str, T]:
    """Asks every store and prints what came of it: a line, or the fields of an object."""

    def show(found: Mapping[str, T]) -> None:
        if options.json:
            stores = [{"address": address, **described(one)} for address, one in found.items()]
            write(json.dumps({"stores": stores}) + "\n")
        else:
            write("".join(f"kvstore {address}: {told(one)}\n" for address, one in found.items()))

    return await ask_each(addresses, ask, show)
