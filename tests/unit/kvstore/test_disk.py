import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from kvrelay.errors import ConfigError, CorruptBlockError
from kvstore.block import StoredBlock
from kvstore.disk import MIN_DISK_BYTES, Changes, DiskFailedError, DiskFullError, DiskTier
from kvstore.entry import Entry
from tests.support.store_blocks import SLAB_BYTES, block_of, info_of, key_of

BOOT = "boot-1"
DISK_BYTES = 4 << 20


def open_tier(path: Path, disk_bytes: int = DISK_BYTES, boot_id: str = BOOT, *, disposable: bool = False) -> DiskTier:
    return DiskTier(path, disk_bytes, boot_id, disposable=disposable)


def write(tier: DiskTier, *numbers: int) -> None:
    tier.write(Changes(blocks=[(entry_of(n), block_of(n)) for n in numbers]))


def entry_of(number: int, slab_bytes: int = SLAB_BYTES) -> Entry:
    return Entry(info_of(number), slab_bytes, last_used_s=float(number))


def large(number: int) -> tuple[Entry, StoredBlock]:
    return entry_of(number, 60_000), block_of(number, 60_000)


def write_until_full(tier: DiskTier) -> None:
    for number in itertools.count():
        tier.write(Changes(blocks=[large(number)]))


def abandon(tier: DiskTier) -> None:
    """As a killed process leaves it: no sync, no marker, but the lock is gone."""
    tier._env.close()
    os.close(tier.directory._lock_fd)


def holds(path: Path, *, disk_bytes: int = DISK_BYTES, boot_id: str = BOOT, disposable: bool = False) -> int:
    tier = open_tier(path, disk_bytes, boot_id, disposable=disposable)
    try:
        return len(tier.scan().entries)
    finally:
        tier.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = open_tier(tmp_path / "store")
    yield tier
    tier.close()


def test_written_blocks_are_read_and_scanned(tier: DiskTier) -> None:
    write(tier, 1, 2)
    assert tier.read(key_of(1)) == block_of(1)
    assert tier.read(key_of(3)) is None
    assert sorted(tier.scan().entries, key=lambda one: one.last_used_s) == [entry_of(1), entry_of(2)]


def test_delete_and_write_are_one_transaction(tier: DiskTier) -> None:
    write(tier, 1)
    tier.write(Changes([key_of(1), key_of(9)], [(entry_of(2), block_of(2))]))
    assert tier.read(key_of(1)) is None
    assert tier.read(key_of(2)) == block_of(2)


def test_a_restart_finds_the_blocks_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1, 2)
    tier.close()
    again = open_tier(tmp_path, boot_id="boot-2")
    assert again.read(key_of(2)) == block_of(2)
    again.close()


def test_a_killed_process_loses_nothing_within_one_boot(tmp_path: Path) -> None:
    for disposable in (False, True):
        path = tmp_path / str(disposable)
        tier = open_tier(path, disposable=disposable)
        write(tier, 1, 2)
        abandon(tier)
        assert holds(path, disposable=disposable) == 2


@pytest.mark.parametrize("boot_id", ["boot-2", ""])
def test_a_durable_tier_is_trusted_after_the_machine_went_down(tmp_path: Path, boot_id: str) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1, 2)
    abandon(tier)
    assert holds(tmp_path, boot_id=boot_id) == 2


@pytest.mark.parametrize("disposable_now", [False, True])
def test_a_disposable_tier_that_was_open_when_the_machine_went_down_is_not_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, disposable_now: bool
) -> None:
    """However it is opened then: what counts is how it was written."""
    tier = open_tier(tmp_path, disposable=True)
    write(tier, 1, 2)
    abandon(tier)
    again = open_tier(tmp_path, boot_id="boot-2", disposable=disposable_now)
    assert (again.scan().entries, again.num_wipes) == ([], 1)
    again.close()
    assert "starts empty" in caplog.text


def test_without_a_boot_id_a_disposable_tier_is_trusted_after_a_clean_close_only(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, boot_id="", disposable=True)
    write(tier, 1)
    tier.close()
    tier = open_tier(tmp_path, boot_id="", disposable=True)
    assert len(tier.scan().entries) == 1
    abandon(tier)
    assert holds(tmp_path, boot_id="", disposable=True) == 0


@pytest.mark.parametrize("disposable", [False, True])
def test_a_durable_tier_is_synced_by_every_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disposable: bool
) -> None:
    opened: list[dict[str, object]] = []
    real_open = lmdb.open
    monkeypatch.setattr(lmdb, "open", lambda *args, **options: opened.append(options) or real_open(*args, **options))
    open_tier(tmp_path, disposable=disposable).close()
    assert [(one["sync"], one["metasync"], one["writemap"]) for one in opened] == [(not disposable, False, False)]


@pytest.mark.parametrize("state", [b"", b"{not json", b"[]", json.dumps({"version": 99, "clean": True}).encode()])
def test_an_unknown_state_is_not_trusted(tmp_path: Path, state: bytes) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1)
    tier.close()
    (tmp_path / "kvstore.state").write_bytes(state)
    assert holds(tmp_path) == 0


def test_a_file_that_is_no_lmdb_is_replaced(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (tmp_path / "data.mdb").write_bytes(b"\xff" * 40_000)
    assert holds(tmp_path) == 0


def test_a_file_with_lost_pages_is_replaced(tmp_path: Path) -> None:
    """The meta pages are right, all others are zeros, as after a crash of the machine."""
    tier = open_tier(tmp_path)
    write(tier, *range(20))
    tier.close()
    data = tmp_path / "data.mdb"
    data.write_bytes(data.read_bytes()[:8192] + bytes(data.stat().st_size - 8192))
    assert holds(tmp_path) == 0


def test_a_truncated_file_is_replaced(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, *range(20))
    tier.close()
    os.truncate(tmp_path / "data.mdb", 65_536)
    assert holds(tmp_path) == 0


def test_a_file_above_a_lowered_bound_is_replaced(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, *range(200))
    tier.close()
    assert holds(tmp_path, disk_bytes=MIN_DISK_BYTES) == 0
    assert holds(tmp_path) == 0


def test_a_corrupt_record_is_told_from_a_missing_one(tier: DiskTier) -> None:
    write(tier, 1)
    with tier._env.begin(write=True) as txn:
        record = bytearray(txn.get(key_of(1)))
        record[500] ^= 1
        txn.put(key_of(1), bytes(record))
    with pytest.raises(CorruptBlockError):
        tier.read(key_of(1))


def test_the_read_block_is_a_copy_of_its_own(tier: DiskTier) -> None:
    write(tier, 1)
    block = tier.read(key_of(1))
    tier.write(Changes([key_of(1)]))
    for number in range(2, 60):
        write(tier, number)
    assert block == block_of(1)


def test_a_second_process_gets_a_clear_error(tier: DiskTier, tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = f"from kvstore.disk import DiskTier; from pathlib import Path; DiskTier(Path({str(path)!r}), 1 << 22, 'b')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert f"kvstore path {path} is in use by another process (pid {os.getpid()})" in found.stderr
    write(tier, 1)
    assert tier.read(key_of(1)) == block_of(1)


def test_a_second_opening_in_one_process_gets_the_same_error(tier: DiskTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another process"):
        open_tier(tmp_path / "store")


def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory; choose another"):
        open_tier(tmp_path / "file" / "store")


def test_a_full_map_is_told_and_recovered_from(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, MIN_DISK_BYTES)
    with pytest.raises(DiskFullError):
        write_until_full(tier)
    assert tier.read(key_of(0)) == large(0)[1]
    tier.make_room([key_of(n) for n in range(3)])
    tier.write(Changes(blocks=[large(1000), large(1001)]))
    assert tier.read(key_of(1001)) == large(1001)[1]
    assert (tmp_path / "data.mdb").stat().st_size <= MIN_DISK_BYTES
    tier.close()


class PanickedEnvironment:
    """Refuses everything, as LMDB does when it could not write its head, until it is opened anew."""

    def __init__(self, env: lmdb.Environment) -> None:
        self.close = env.close

    def begin(self, **options: object) -> lmdb.Transaction:
        raise lmdb.PanicError("Update of meta page failed or environment had fatal error")


def test_an_environment_that_gave_up_is_opened_anew(tier: DiskTier) -> None:
    write(tier, 1)
    tier._env = PanickedEnvironment(tier._env)
    with pytest.raises(DiskFailedError, match="could not finish a transaction"):
        write(tier, 2)
    write(tier, 3)
    assert [tier.read(key_of(n)) for n in (1, 2, 3)] == [block_of(1), None, block_of(3)]


def test_dead_readers_are_cleared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reader killed inside a transaction would keep every page it sees from being used again."""
    tier = open_tier(tmp_path)
    write(tier, 1)
    code = (
        f"import lmdb, os; env = lmdb.open({str(tmp_path)!r}, map_size={DISK_BYTES}); txn = env.begin();"
        "txn.get(b'x'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    tier.check_readers()
    assert "cleared 1 dead LMDB readers" in caplog.text
    tier.close()


def test_lmdb_is_the_version_the_page_arithmetic_was_measured_with() -> None:
    assert lmdb.version()[:2] == (0, 9)
