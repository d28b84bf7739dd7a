"""GB/s of Get and Put through the store's gRPC, beside what else could keep the blocks, and the bare KV stream."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.engine.launch import Worker
from bench.handoff.pace import GB
from bench.handoff.plan import command as handoff_command
from bench.handoff.samples import Bar, Samples
from bench.handoff.shapes import LAYOUTS
from bench.store import page_cache
from bench.store.plan import FILL, RATES, Setting, command, start
from bench.store.processes import free_port, restart, store_process
from bench.store.shapes import PREFIX_TOKENS, num_blocks
from tests.support.cluster import RoleProcess

KVRELAY = "kvrelay's store"
STREAM = "the bare KV stream, pool to pool"
LMDB = "raw LMDB, in process"
LMDB_STREAM = "raw LMDB behind bare gRPC"
FILES = "one file a block, in process"
REDIS = "Redis, loopback"

GET_MEMORY = "Get, memory"
GET_WARM = "Get, disk, page cache warm"
GET_COLD = "Get, disk, cold"
PUT_MEMORY = "Put, memory"
PUT_DISK = "Put, until on disk"

EIGHT_B = "8B prefix"
PREFIX_MS = f"{PREFIX_TOKENS:,} tokens in place, ms"
PREFIX_RATE = "tokens/s: the prefill speed that it breaks even with"
NUM_CHAINS = 2  # that each store holds: it is full after these, and each new one takes the place of an older


def measure(setting: Setting, samples: Samples, _: int) -> None:
    """One round. Raises WorkerFailedError."""
    for shape in LAYOUTS:
        round_ = _Round(setting, samples, shape)
        round_.store()
        round_.bare_stream()
        round_.lmdb()
        round_.files()
        if setting.redis is not None:
            round_.redis(setting.redis)


class _Round:
    def __init__(self, setting: Setting, samples: Samples, shape: str) -> None:
        self._setting = setting
        self._samples = samples
        self._shape = shape
        self._seconds = setting.effort.rate_s
        self._slab_bytes = LAYOUTS[shape].slab_bytes
        self._num_blocks = num_blocks(shape)

    def store(self) -> None:
        """One with memory alone, and one with a disk alone, so that every read is of the tier that is meant."""
        num_bytes = int((NUM_CHAINS + 0.5) * self._num_blocks * self._slab_bytes)
        with (
            self._directory() as path,
            store_process("--memory-bytes", str(num_bytes)) as memory,
            store_process(
                "--memory-bytes", "0", "--path", str(path), "--disk-bytes", str(int(num_bytes / FILL))
            ) as disk,
            self._client() as client,
        ):
            putting = {"do": "put", "seconds": self._seconds, "num_before": NUM_CHAINS}
            self._ask(client, PUT_MEMORY, memory, on_disk=False, **putting)
            self._ask(client, GET_MEMORY, memory, do="get", tier="memory", seconds=self._seconds)
            self._ask(client, PUT_DISK, disk, on_disk=True, **putting)
            self._ask(client, GET_WARM, disk, do="get", tier="disk", seconds=self._seconds)
            disk.stop()
            page_cache.drop(path / "data.mdb")
            restart(disk)
            self._ask(client, GET_COLD, disk, do="get", tier="disk")

    def bare_stream(self) -> None:
        task: dict[str, object] = {"shape": self._shape, "num_blocks": self._num_blocks}
        spare = task | {"num_blocks": self._num_blocks + 1}
        with start("the receiver", handoff_command("receiver", spare)) as far:
            sending = handoff_command("sender", task | far.read() | {"peer_pid": far.pid})
            with start("the sender", sending) as near:
                near.read()
                self._add(STREAM, GET_MEMORY, near.ask(do="transfer", seconds=self._seconds))

    def lmdb(self) -> None:
        with self._directory() as path:
            with self._peer("raw_lmdb", path=str(path)) as peer:
                self._add_all(LMDB, peer)
            serving = command("lmdb_stream", {"path": str(path), "slab_bytes": self._slab_bytes})
            with start("the LMDB server", serving) as far:
                reading = far.read() | {"num_bytes": self._num_blocks * self._slab_bytes}
                with start("its reader", command("lmdb_stream", reading)) as near:
                    near.read()
                    self._add(LMDB_STREAM, GET_WARM, near.ask(seconds=self._seconds))

    def files(self) -> None:
        with self._directory() as path, self._peer("files", path=str(path)) as peer:
            self._add_all(FILES, peer)

    def redis(self, program: Path) -> None:
        port = free_port()
        words = [str(program), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with start("the Redis server", words) as server:
            while "Ready to accept connections" not in server.read_line():
                pass
            with self._peer("redis_client", port=port) as peer:
                self._add(REDIS, PUT_MEMORY, peer.ask(do="put", seconds=self._seconds))
                self._add(REDIS, GET_MEMORY, peer.ask(do="get", seconds=self._seconds))

    def _ask(self, client: Worker, column: str, store: RoleProcess, **order: object) -> None:
        self._add(KVRELAY, column, client.ask(address=store.address, **order))

    def _add_all(self, line: str, peer: Worker) -> None:
        self._add(line, PUT_DISK, peer.ask(do="put", seconds=self._seconds))
        self._add(line, GET_WARM, peer.ask(do="get", seconds=self._seconds))
        self._add(line, GET_COLD, peer.ask(do="get-cold"))

    def _add(self, line: str, column: str, report: dict[str, float]) -> None:
        self._samples.add(table_of(self._shape), line, column, report["bytes_per_s"] / GB)
        if self._shape == "8B" and line == KVRELAY and column.startswith("Get"):
            seconds = self._num_blocks * self._slab_bytes / report["bytes_per_s"]
            self._samples.add(EIGHT_B, column, PREFIX_MS, 1e3 * seconds)
            self._samples.add(EIGHT_B, column, PREFIX_RATE, PREFIX_TOKENS / seconds)

    @contextmanager
    def _client(self) -> Iterator[Worker]:
        task: dict[str, object] = {"shape": self._shape, "num_blocks": self._num_blocks}
        with start("the store's client", command("store_client", task)) as client:
            client.read()
            yield client

    @contextmanager
    def _peer(self, worker: str, **more: object) -> Iterator[Worker]:
        task = {"num_blocks": self._num_blocks, "slab_bytes": self._slab_bytes, **more}
        with start(worker, command(worker, task)) as peer:
            peer.read()
            yield peer

    @contextmanager
    def _directory(self) -> Iterator[Path]:
        path = Path(tempfile.mkdtemp(prefix="store-", dir=self._setting.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)


def table_of(shape: str) -> str:
    return f"{RATES}, {shape}"


def bars() -> list[Bar]:
    found = []
    for shape in LAYOUTS:
        table = table_of(shape)
        memory, warm = (table, KVRELAY, GET_MEMORY), (table, KVRELAY, GET_WARM)
        found += [
            Bar(f"{shape}: Get from memory over the bare KV stream", memory, (table, STREAM, GET_MEMORY), least=0.8),
            Bar(f"{shape}: Get from warm disk over raw LMDB in process", warm, (table, LMDB, GET_WARM), least=0.7),
            Bar(f"{shape}: the same over raw LMDB behind bare gRPC", warm, (table, LMDB_STREAM, GET_WARM), least=0.7),
        ]
    return found
