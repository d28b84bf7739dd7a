"""What `kvrelay store` does and prints, against stores that keep their books in lists and a cluster of fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvrelay import progress_bar, store_command
from kvrelay.cluster import NodeInfo, NodeStatus
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.progress_bar import ProgressBar
from kvrelay.rpc.memberships import Memberships
from kvrelay.types import InstanceId, Role, Tier
from kvstore.block import namespace_key
from kvstore.listing import Progress
from kvstore.selector import Selector
from tests.support.coordinator_ends import Ends, ends
from tests.support.fake_nodes import MODEL
from tests.support.fake_store import ServedStore, served_store
from tests.support.store_blocks import hash_of

KEY = namespace_key(MODEL.fingerprint, MODEL.layout.fingerprint)
OTHER_KEY = namespace_key("cd" * 32, MODEL.layout.fingerprint)


@dataclass
class Output:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *argv: str) -> Output:
        status = await asyncio.to_thread(store_command.main, argv)
        printed = self._capsys.readouterr()
        return Output(status, printed.out, printed.err)


@pytest.fixture
def store_command_line(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@asynccontextmanager
async def joined(served: ServedStore, cluster: Ends) -> AsyncIterator[None]:
    """The store as a member of the cluster."""
    info = NodeInfo(Role.KVSTORE, InstanceId(f"store {served.address}"), served.address, None)
    memberships = Memberships((cluster.address,), info, lambda: NodeStatus(ready=True), interval_s=0.1)
    await memberships.start()
    await memberships.wait_joined()
    try:
        yield
    finally:
        await memberships.close()


def hold_chains(served: ServedStore) -> None:
    """1 - 2 - 3 of the default tenant, 11 - 12 of another, unused for longer, and 21 of another model."""
    served.store.hold(KEY, [1, 2, 3])
    served.store.hold(KEY, [11, 12], root=10, tenant="acme", unused_s=5_000.0, expires_in_s=None, pinned_s=90.0)
    served.store.hold(OTHER_KEY, [21], root=20, tier=Tier.DISK, unused_s=1.0)


def short(number: int) -> str:
    return hash_of(number).hex()[:16]


async def test_stats(store_command_line: Shell) -> None:
    async with served_store() as served:
        served.store.hold(KEY, [1, 2])
        printed = await store_command_line("stats", "--store", served.address)
        described = await store_command_line("stats", "--store", served.address, "--json")
    assert printed.out.splitlines() == [
        f"kvstore {served.address}",
        "TIER    BLOCKS  HELD     OF        HITS  EVICTIONS",
        "memory  2       2.0 KiB  7.8 KiB   5     1",
        "disk    7       7.0 KiB  64.0 KiB  3     2",
        "11 misses, 4 expired, 0 pinned, 6 refused, 1 corrupt, 2 write failures; a file of 128.0 KiB",
        "TENANT   MEMORY   OF       DISK     OF",
        "acme     2.9 KiB  3.9 KiB  4.9 KiB  -",
        "default  1000 B   -        0 B      -",
    ]
    [store] = described.json["stores"]
    assert (store["address"], store["memory"]["num_blocks"], store["disk"]["hits"]) == (served.address, 2, 3)
    assert store["tenants"][0]["memory_quota_bytes"] == 4_000
    assert (printed.status, printed.err, described.status) == (0, "", 0)


async def test_stats_say_when_nothing_goes_to_disk(store_command_line: Shell) -> None:
    async with served_store() as served:
        served.store.without_disk = True
        printed = await store_command_line("stats", "--store", served.address)
    assert "the disk tier takes no blocks now: its device is full or fails" in printed.out


async def test_ls_shows_chains(store_command_line: Shell) -> None:
    async with served_store() as served:
        hold_chains(served)
        printed = await store_command_line("ls", "--store", served.address)
    assert printed.out.splitlines() == [
        f"kvstore {served.address}: 6 blocks in 3 chains, 5.9 KiB",
        "LAST BLOCK        BLOCKS  SIZE     TIER    TENANT   UNUSED  EXPIRES  PINNED",
        f"{short(21)}  1       1000 B   disk    default  1s      in 50s   -",
        f"{short(3)}  3       2.9 KiB  memory  default  10s     in 50s   -",
        f"{short(12)}  2       2.0 KiB  memory  acme     1.4h    never    1.5m",
    ]


async def test_ls_shows_blocks_and_no_more_than_wanted(store_command_line: Shell) -> None:
    async with served_store() as served:
        hold_chains(served)
        printed = await store_command_line("ls", "--blocks", "--limit", "2", "--store", served.address)
        nothing = await store_command_line("ls", "--tenant", "nobody", "--store", served.address)
    assert printed.out.splitlines() == [
        f"kvstore {served.address}: 6 blocks, 5.9 KiB",
        "BLOCK             PLACE  SIZE    TIER    TENANT   UNUSED  EXPIRES  PINNED",
        f"{short(21)}  0      1000 B  disk    default  1s      in 50s   -",
        f"{short(1)}  0      1000 B  memory  default  10s     in 50s   -",
        "... and 4 more; --limit 0 shows all",
    ]
    assert nothing.out == f"kvstore {served.address}: 0 blocks in 0 chains, 0 B\n"


async def test_ls_in_json_is_a_line_a_block(store_command_line: Shell) -> None:
    async with served_store() as served:
        hold_chains(served)
        printed = await store_command_line("ls", "--json", "--tenant", "acme", "--store", served.address)
        first = await store_command_line("ls", "--json", "--limit", "1", "--store", served.address)
    blocks = [json.loads(line) for line in printed.out.splitlines()]
    assert [block["block_hash"] for block in blocks] == [hash_of(11).hex(), hash_of(12).hex()]
    assert len(first.out.splitlines()) == 1
    assert blocks[0] == {
        "store": served.address,
        "block_hash": hash_of(11).hex(),
        "parent_hash": hash_of(10).hex(),
        "chain_index": 0,
        "namespace_key": KEY.hex(),
        "tenant": "acme",
        "tier": "memory",
        "num_bytes": 1_000,
        "unused_s": 5_000.0,
        "expires_in_s": None,
        "pinned_s": 90.0,
    }


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (["--tenant", "acme"], {1, 2, 3, 21}),
        (["--prefix", hash_of(2).hex()], {1, 11, 12, 21}),
        (["--prefix", hash_of(2).hex()[:8].upper()], {1, 11, 12, 21}),
        (["--older-than", "1h"], {1, 2, 3, 21}),
        (["--model", "cd" * 32], {1, 2, 3, 11, 12}),
        (["--tenant", "acme", "--prefix", hash_of(2).hex()], {1, 2, 3, 11, 12, 21}),
    ],
)
async def test_evict_drops_what_matches_all_that_is_given(
    flags: list[str], left: set[int], store_command_line: Shell
) -> None:
    async with served_store() as served:
        hold_chains(served)
        printed = await store_command_line("evict", "--store", served.address, *flags)
        remaining = {key[16:] for key in served.store.held}
    assert remaining == {hash_of(number) for number in left}
    assert printed.out.startswith(f"kvstore {served.address}: {6 - len(left)} blocks dropped, ")
    assert printed.status == 0


async def test_evict_takes_a_model_by_the_name_it_is_served_under(store_command_line: Shell) -> None:
    async with ends() as cluster, served_store() as served:
        hold_chains(served)
        flags = ("--store", served.address, "--address", cluster.address, "--json")
        printed = await store_command_line("evict", "--model", "bytes", *flags)
        unknown = await store_command_line("evict", "--model", "other", *flags)
    assert printed.json == {"stores": [{"address": served.address, "num_blocks": 5, "num_bytes": 5_000}]}
    assert (unknown.status, unknown.err) == (
        1,
        "kvrelay store evict: model 'other' is not served here; 'bytes' is\n",
    )


async def test_a_prefix_has_to_be_of_one_block(store_command_line: Shell) -> None:
    async with served_store() as served:
        hold_chains(served)
        printed = await store_command_line("evict", "--prefix", "0" * 8, "--store", served.address)
        assert len(served.store.held) == 6
    assert printed.status == 1
    assert "no block's hash begins with 00000000; `kvrelay store ls` shows what is held" in printed.err


async def test_every_store_of_the_cluster_is_asked(store_command_line: Shell) -> None:
    async with ends() as cluster, served_store() as one, served_store() as other:
        one.store.hold(KEY, [1, 2])
        other.store.hold(KEY, [1], tenant="acme")
        async with joined(one, cluster), joined(other, cluster):
            printed = await store_command_line("evict", "--older-than", "0", "--json", "--address", cluster.address)
    stores = {store["address"]: store["num_blocks"] for store in printed.json["stores"]}
    assert stores == {one.address: 2, other.address: 1}
    assert one.store.selected == other.store.selected == [Selector(unused_s=0.0)]


async def test_a_store_that_fails_does_not_keep_the_others_from_it(store_command_line: Shell) -> None:
    async with served_store() as served:
        served.store.hold(KEY, [1, 2])
        stores = f"127.0.0.1:1,{served.address}"
        printed = await store_command_line("evict", "--tenant", "default", "--store", stores)
        assert served.store.held == {}
    assert printed.out == f"kvstore {served.address}: 2 blocks dropped, 2.0 KiB\n"
    assert printed.err.startswith("kvrelay store evict: no kvstore answers at 127.0.0.1:1")
    assert printed.status == 1


async def test_a_cluster_without_a_store(store_command_line: Shell) -> None:
    async with ends() as cluster:
        printed = await store_command_line("stats", "--address", cluster.address)
    what = f"no kvstore has joined the coordinator at {cluster.address}"
    where = f"{what}; name one by --store HOST:PORT (a Redis has tools of its own)"
    assert (printed.status, printed.err) == (1, f"kvrelay store stats: {where}\n")


async def test_nobody_there(store_command_line: Shell) -> None:
    printed = await store_command_line("stats", "--address", "127.0.0.1:1")
    assert printed.err.startswith("kvrelay store stats: no coordinator answers at 127.0.0.1:1")
    assert printed.status == 1


async def test_verify_and_compact(store_command_line: Shell) -> None:
    async with served_store() as served:
        verified = await store_command_line("verify", "--store", served.address)
        compacted = await store_command_line("compact", "--store", served.address)
        described = await store_command_line("verify", "--store", served.address, "--json")
    assert verified.out == f"kvstore {served.address}: 4 blocks on disk read, 1 corrupt and dropped\n"
    assert compacted.out == f"kvstore {served.address}: the file is 4.0 KiB smaller\n"
    assert described.json == {"stores": [{"address": served.address, "num_blocks": 4, "num_corrupt": 1}]}
    assert verified.err == compacted.err == "", "no bar where nobody watches"


async def test_who_watches_sees_how_far_it_is(store_command_line: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []

    class Watched(ProgressBar):
        def __init__(self, title: str, unit: str) -> None:
            self._title = title

        def __exit__(self, *args: object) -> None:
            seen.append(("closed", 0, 0))

        def show(self, num_done: int, num_total: int) -> None:
            seen.append((self._title, num_done, num_total))

    monkeypatch.setattr("kvrelay.store_work.ProgressBar", Watched)
    async with served_store() as served:
        served.store.steps = [Progress(1, 2), Progress(2, 2)]
        await store_command_line("verify", "--store", served.address)
    title = f"verify {served.address}"
    assert seen == [(title, 1, 2), (title, 2, 2), ("closed", 0, 0)]


def test_a_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_bar.sys.stderr, "isatty", lambda: True, raising=False)
    with ProgressBar("verify", "block") as bar:
        bar.show(3, 4)
    assert "verify:  75%" in capsys.readouterr().err


async def test_pin_and_unpin(store_command_line: Shell) -> None:
    async with ends() as cluster, served_store() as served:
        served.store.hold(KEY, [1, 2])
        flags = ("--store", served.address, "--address", cluster.address)
        pinned = await store_command_line("pin", "--prefix", hash_of(2).hex()[:12], "--for", "2d", *flags)
        assert served.store.held[KEY + hash_of(2)].pinned_s == 172_800.0
        unpinned = await store_command_line("pin", "--prefix", hash_of(2).hex(), "--for", "0", "--json", *flags)
        assert served.store.held[KEY + hash_of(2)].pinned_s == 0.0
        missing = await store_command_line("pin", "--prefix", hash_of(9).hex(), *flags)
    assert pinned.out == f"kvstore {served.address}: pinned for 2d\n"
    assert unpinned.json == {"stores": [{"address": served.address, "held": True, "pin_s": 0.0}]}
    assert missing.status == 1
    assert missing.out == f"kvstore {served.address}: not held here\n"
    assert f"no store holds {hash_of(9).hex()} for the model that is served" in missing.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["evict"], "say which blocks: --tenant, --model, --prefix or --older-than"),
        (["ls", "--limit", "-1"], "--limit is -1; allowed is 0 (all) or more"),
        (["pin", "--prefix", "ab" * 32, "--for", "8d"], "--for is 8d; allowed is a week at most"),
        (["warm", "f", "--concurrency", "0"], "--concurrency is 0; allowed is [1, 256]"),
        (["warm", "f", "--timeout", "0"], "--timeout is 0; allowed is a length of time over 0"),
    ],
)
def test_contradictions(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert store_command.main(argv) == 2
    assert f"kvrelay store {argv[0]}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["evict", "--prefix", "abc"], "'abc' is no block's hash; give 8 to 64 hex digits of one"),
        (["evict", "--prefix", "g" * 64], "is no block's hash"),
        (["evict", "--older-than", "soon"], "'soon' is no length of time; write one such as 90s, 5m, 1h or 2d"),
        (["warm", "f", "--cache-salt", "a", "--public-cache", "b"], "not allowed with argument"),
    ],
)
def test_what_the_command_line_does_not_take(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        store_command.main(argv)
    assert message in capsys.readouterr().err


# warm


async def offload(cluster: Ends, served: ServedStore, num_prompts: int) -> None:
    """What a prefill node does once it has computed a prompt."""
    node = cluster.prefill[0]
    for number in range(num_prompts):
        await node.until(lambda number=number: len(node.requests) > number)  # type: ignore[misc]
        request = node.requests[number]
        root = chain_root(MODEL.fingerprint, MODEL.layout.fingerprint, request.tenant_salt)
        for block_hash in block_hashes(root, request.token_ids, MODEL.layout.block_tokens):
            served.store.held[KEY + block_hash] = served.store.held[KEY + hash_of(1)]


def write_prompts(directory: Path, *lines: dict[str, Any]) -> str:
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


async def test_warm_waits_until_a_store_has_every_prefix(store_command_line: Shell, tmp_path: Path) -> None:
    """Three stores, of which the first is gone and the last gets the blocks."""
    file = write_prompts(
        tmp_path,
        {"text": "0123456789" * 10},
        {"text": "abcdefghij" * 10, "cache_salt": "mine", "cache_ttl": "1h"},
        {"text": "short"},
    )
    async with ends() as cluster, served_store() as empty, served_store() as served:
        served.store.hold(KEY, [1])
        cluster.prefill[0].cached = cluster.prefill[0].cached.__class__(device=32)
        offloading = asyncio.create_task(offload(cluster, served, 3))
        stores = f"127.0.0.1:1,{empty.address},{served.address}"
        flags = ("--store", stores, "--address", cluster.address, "--concurrency", "1")
        printed = await store_command_line("warm", file, "--json", *flags)
        await offloading
        requests = cluster.prefill[0].requests
        assert [request.sampling.max_tokens for request in requests] == [1, 1, 1]
        assert [request.cache_ttl_s for request in requests] == [None, 3_600.0, None]
        assert requests[0].tenant_salt == requests[2].tenant_salt != requests[1].tenant_salt
        again = await store_command_line("warm", file, *flags)
    first, second, third = printed.json["prompts"]
    assert (first["line"], first["prompt_tokens"], first["cached_tokens"]) == (1, 100, 32)
    assert len(first["prefix_hash"]) == len(second["prefix_hash"]) == 64
    assert [one["is_stored"] for one in (first, second, third)] == [True] * 3
    assert (third["prefix_hash"], third["error"]) == ("", "")
    assert again.out.splitlines() == ["2 of 3 prompts are in a store, 200 tokens", "1 are shorter than a block"]
    assert (printed.status, again.status) == (0, 0)


async def test_warm_tells_of_each_prompt_that_fails_and_goes_on(store_command_line: Shell, tmp_path: Path) -> None:
    file = write_prompts(tmp_path, {"text": "x" * 2_000}, {"text": "0123456789" * 10}, {"text": ""})
    async with ends() as cluster, served_store() as served:
        flags = ("--store", served.address, "--address", cluster.address, "--wait", "0")
        printed = await store_command_line("warm", file, *flags)
    told = printed.out.splitlines()
    assert told[0].startswith("line 1: the prompt has 2000 tokens")
    assert told[1:] == [
        "line 2: no store holds it after 0 s",
        "line 3: the prompt is empty; it needs at least one token",
        "0 of 3 prompts are in a store, 0 tokens",
    ]
    assert (printed.status, printed.err) == (1, "kvrelay store warm: 3 of 3 prompts are in no store\n")


async def test_warm_says_so_when_no_store_can_be_asked(store_command_line: Shell, tmp_path: Path) -> None:
    file = write_prompts(tmp_path, {"text": "0123456789" * 10})
    async with ends() as cluster:
        printed = await store_command_line("warm", file, "--store", "127.0.0.1:1", "--address", cluster.address)
    assert printed.out.startswith("line 1: no kvstore answers at 127.0.0.1:1")
    assert printed.status == 1


async def test_warm_reads_the_whole_file_before_it_asks(store_command_line: Shell, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "fine"}\n{"texts": "not"}\n')
    async with ends() as cluster, served_store() as served:
        printed = await store_command_line("warm", str(file), "--store", served.address, "--address", cluster.address)
        assert cluster.prefill[0].requests == []
    assert printed.err.startswith("kvrelay store warm: line 2: unknown key 'texts'")


def test_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        store_command.main(["--help"])
    said = capsys.readouterr().out
    names: Sequence[str] = ("stats", "ls", "verify", "compact", "evict", "pin", "warm")
    assert [name for name in names if f"    {name} " not in said] == []
