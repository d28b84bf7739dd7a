"""`kvrelay store stats` and `kvrelay store ls`: what stores hold and have done."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvrelay.client_command import size, write
from kvrelay.duration import show_duration
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.kv.store_messages import BlockReport, StoreReport, TenantReport
from kvrelay.store_chains import StoredChain, chains
from kvrelay.store_targets import ask_each, model_fingerprint, store_addresses
from kvrelay.types import Tier

_TIERS = (("memory", Tier.MEMORY), ("disk", Tier.DISK))
_SHOWN_CHARS = 16  # of a hash
DEFAULT_LIMIT = 50  # lines for people


async def show_stats(options: argparse.Namespace) -> None:
    def show(found: Mapping[str, StoreReport]) -> None:
        if options.json:
            stores = [{"address": address, **asdict(report)} for address, report in found.items()]
            write(json.dumps({"stores": stores}) + "\n")
        else:
            write("\n\n".join(stats_table(address, report) for address, report in found.items()) + "\n")

    await ask_each(await store_addresses(options), StoreAdmin.stats, show)


async def show_blocks(options: argparse.Namespace) -> None:
    fingerprint = await model_fingerprint(options)

    async def held(admin: StoreAdmin) -> list[BlockReport]:
        return [block async for block in admin.list(options.tenant, fingerprint)]

    def show(found: Mapping[str, list[BlockReport]]) -> None:
        for address, blocks in found.items():
            if options.json:
                shown = blocks[: options.limit or None]
                write("".join(json.dumps({"store": address, **describe(block)}) + "\n" for block in shown))
            else:
                limit = DEFAULT_LIMIT if options.limit is None else options.limit
                write(f"{blocks_table(address, blocks, limit, each=options.blocks)}\n")

    await ask_each(await store_addresses(options), held, show)


def describe(block: BlockReport) -> dict[str, Any]:
    """A line of `ls --json`; hashes in hex, times in seconds."""
    named = {"block_hash": block.block_hash.hex(), "parent_hash": block.parent_hash.hex(), "tier": block.tier.value}
    return {**asdict(block), **named}


def stats_table(address: str, report: StoreReport) -> str:
    rows = [("TIER", "BLOCKS", "HELD", "OF", "HITS", "EVICTIONS")]
    for name, tier in (("memory", report.memory), ("disk", report.disk)):
        held, most = size(tier.num_bytes), size(tier.capacity_bytes)
        rows.append((name, f"{tier.num_blocks:,}", held, most, f"{tier.hits:,}", f"{tier.evictions:,}"))
    counts = (
        f"{report.misses:,} misses, {report.expired:,} expired, {report.num_pinned:,} pinned, "
        f"{report.refused:,} refused, {report.corrupt:,} corrupt, {report.write_failures:,} write failures; "
        f"a file of {size(report.file_bytes)}"
    )
    lines = [f"kvstore {address}", *columns(rows), counts]
    if report.disk.capacity_bytes and not report.disk_writing:
        lines.append("the disk tier takes no blocks now: its device is full or fails; the store's log says which")
    if report.tenants:
        lines += columns([("TENANT", "MEMORY", "OF", "DISK", "OF"), *map(_tenant_cells, report.tenants)])
    return "\n".join(lines)


def blocks_table(address: str, blocks: Sequence[BlockReport], limit: int, *, each: bool) -> str:
    """One line for each chain, or for each block; `limit` of them at most, 0 for all."""
    if each:
        ordered = sorted(blocks, key=lambda block: (block.unused_s, block.chain_index))
        rows = [_block_cells(block) for block in ordered]
        header = ("BLOCK", "PLACE", "SIZE", "TIER", "TENANT", "UNUSED", "EXPIRES", "PINNED")
    else:
        rows = [_chain_cells(chain) for chain in chains(blocks)]
        header = ("LAST BLOCK", "BLOCKS", "SIZE", "TIER", "TENANT", "UNUSED", "EXPIRES", "PINNED")
    shown = rows[:limit] if limit else rows
    what = f"{len(blocks):,} blocks" + ("" if each else f" in {len(rows):,} chains")
    held = size(sum(block.num_bytes for block in blocks))
    rest = [f"... and {len(rows) - len(shown):,} more; --limit 0 shows all"] if len(shown) < len(rows) else []
    return "\n".join([f"kvstore {address}: {what}, {held}", *(columns([header, *shown]) if shown else ()), *rest])


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _tenant_cells(tenant: TenantReport) -> tuple[str, ...]:
    memory, disk = (size(quota) if quota else "-" for quota in (tenant.memory_quota_bytes, tenant.disk_quota_bytes))
    return (tenant.tenant, size(tenant.memory_bytes), memory, size(tenant.disk_bytes), disk)


def _block_cells(block: BlockReport) -> tuple[str, ...]:
    return (*_name(block), str(block.chain_index), size(block.num_bytes), block.tier.value, *_life(block))


def _chain_cells(chain: StoredChain) -> tuple[str, ...]:
    tiers = "+".join(name for name, tier in _TIERS if tier in chain.tiers)
    return (*_name(chain.last), str(chain.num_blocks), size(chain.num_bytes), tiers, *_life(chain.last))


def _name(block: BlockReport) -> tuple[str]:
    return (block.block_hash.hex()[:_SHOWN_CHARS],)


def _life(block: BlockReport) -> tuple[str, ...]:
    expires = "never" if block.expires_in_s is None else f"in {show_duration(block.expires_in_s)}"
    pinned = show_duration(block.pinned_s) if block.pinned_s else "-"
    return (block.tenant, show_duration(block.unused_s), expires, pinned)
