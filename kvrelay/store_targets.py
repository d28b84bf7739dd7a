"""What a `kvrelay store` command line means: which stores, which model, which block."""

from __future__ import annotations

import argparse
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from kvrelay.client import AsyncClient
from kvrelay.client_command import address_argument
from kvrelay.errors import InvalidRequestError, KVRelayError, NotFoundError
from kvrelay.kv.hashing import HASH_BYTES
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.kv.store_messages import StoreNamespace
from kvrelay.rpc.credentials import peer_tls_of
from kvrelay.types import Role

T = TypeVar("T")

MIN_PREFIX_CHARS = 8
_HEX = re.compile(r"[0-9a-f]+")
_FULL_CHARS = 2 * HASH_BYTES  # of a block hash, and of a model's fingerprint


async def store_addresses(options: argparse.Namespace) -> list[str]:
    """Those of --store, or all that joined the coordinator. Raises NotFoundError when none did."""
    if options.store:
        return list(options.store)
    async with AsyncClient(options.address) as client:
        status = await client.status()
    found = sorted(report.info.address for report in status.nodes if report.info.role is Role.KVSTORE)
    if not found:
        raise NotFoundError(
            f"no kvstore has joined the coordinator at {options.address}; name one by --store HOST:PORT "
            "(a Redis has tools of its own)"
        )
    return found


async def ask_each(
    addresses: Sequence[str],
    ask: Callable[[StoreAdmin], Awaitable[T]],
    show: Callable[[Mapping[str, T]], None] = lambda found: None,
) -> Mapping[str, T]:
    """What every store answers, one after another, by its address. Where some fail, the answers of the others are shown
    before it raises KVRelayError."""
    found: dict[str, T] = {}
    failed: list[KVRelayError] = []
    for address in addresses:
        async with StoreAdmin(address, tls=peer_tls_of()) as admin:
            try:
                found[address] = await ask(admin)
            except KVRelayError as error:
                failed.append(error)
    if found:
        show(found)
    if len(failed) > 1:
        raise KVRelayError("; ".join(error.message for error in failed))
    if failed:
        raise failed[0]
    return found


async def model_fingerprint(options: argparse.Namespace) -> str:
    """Of --model, which is a fingerprint itself or a name the coordinator serves; "" where it is not given."""
    if not options.model:
        return ""
    if _is_full(options.model):
        return str(options.model)
    async with AsyncClient(options.address) as client:
        return (await client.get_model(options.model)).fingerprint


async def served_namespace(options: argparse.Namespace) -> StoreNamespace:
    """Of the model that the coordinator serves."""
    async with AsyncClient(options.address) as client:
        model = await client.get_model()
    return StoreNamespace(model.fingerprint, model.layout.fingerprint)


async def find_block(addresses: Sequence[str], prefix: str) -> bytes:
    """The hash that begins with these hex digits in any of the stores. Raises NotFoundError, or InvalidRequestError
    when several do; all 64 digits are taken as they are."""
    if _is_full(prefix):
        return bytes.fromhex(prefix)

    async def matching(admin: StoreAdmin) -> set[bytes]:
        return {bytes(block.block_hash) async for block in admin.list() if block.block_hash.hex().startswith(prefix)}

    found: set[bytes] = set().union(*(await ask_each(addresses, matching)).values())
    if not found:
        raise NotFoundError(f"no block's hash begins with {prefix}; `kvrelay store ls` shows what is held")
    if len(found) > 1:
        raise InvalidRequestError(f"the hashes of {len(found)} blocks begin with {prefix}; give more of it")
    return found.pop()


def prefix_argument(text: str) -> str:
    """At least 8 hex digits of a block hash, for argparse."""
    digits = text.strip().lower()
    if not (MIN_PREFIX_CHARS <= len(digits) <= _FULL_CHARS and _HEX.fullmatch(digits)):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no block's hash; give {MIN_PREFIX_CHARS} to {_FULL_CHARS} hex digits of one, as "
            "`kvrelay store ls` shows them"
        )
    return digits


def addresses_argument(text: str) -> list[str]:
    """Different host:port with commas between, for argparse."""
    return list(dict.fromkeys(address_argument(address.strip()) for address in text.split(",")))


def _is_full(text: str) -> bool:
    return len(text) == _FULL_CHARS and _HEX.fullmatch(text) is not None
