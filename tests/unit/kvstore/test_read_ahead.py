import asyncio

from kvstore.block import StoredBlock
from kvstore.disk import Outcome
from kvstore.read_ahead import JOB_BLOCKS, JOB_BYTES, MAX_JOBS, ReadAhead
from tests.support.store_blocks import block_of, key_of


class Disk:
    """Has the blocks with these numbers; jobs end when they are told to."""

    def __init__(self, numbers: range, slab_bytes: int = 100) -> None:
        self.begun: list[list[bytes]] = []
        self.jobs: list[asyncio.Future[list[Outcome]]] = []
        self._sizes = {key_of(number): slab_bytes for number in numbers}

    def size(self, key: bytes) -> int:
        return self._sizes.get(key, 0)

    def read(self, keys: list[bytes]) -> asyncio.Future[list[Outcome]]:
        self.begun.append(keys)
        self.jobs.append(asyncio.get_running_loop().create_future())
        return self.jobs[-1]

    def ahead_of(self, count: int) -> ReadAhead:
        return ReadAhead([key_of(number) for number in range(count)], self.size, self.read)


async def test_neighbours_are_read_by_one_job_and_only_so_many_jobs_are_under_way() -> None:
    disk = Disk(range(1_000))
    ahead = disk.ahead_of(1_000)
    ahead.advance(0)
    assert [len(keys) for keys in disk.begun] == [JOB_BLOCKS] * MAX_JOBS
    disk.jobs[0].set_result([block_of(number) for number in range(JOB_BLOCKS)])
    for number in range(JOB_BLOCKS):
        ahead.advance(number)
        assert len(disk.begun) == MAX_JOBS
        found = await ahead.take(key_of(number))
        assert isinstance(found, StoredBlock)
        assert found.payload == block_of(number).payload
    ahead.advance(JOB_BLOCKS)
    assert len(disk.begun) == MAX_JOBS + 1
    ahead.close()


async def test_large_blocks_are_read_one_by_one() -> None:
    disk = Disk(range(10), slab_bytes=JOB_BYTES)
    disk.ahead_of(10).advance(0)
    assert [len(keys) for keys in disk.begun] == [1] * MAX_JOBS


async def test_what_is_elsewhere_is_passed_over_but_not_without_end() -> None:
    disk = Disk(range(5, 8))
    disk.ahead_of(20).advance(0)
    assert disk.begun == [[key_of(5), key_of(6), key_of(7)]]
    far = Disk(range(100_000, 100_001))
    far.ahead_of(100_001).advance(0)
    assert far.begun == []


async def test_what_is_left_is_given_up() -> None:
    disk = Disk(range(1_000))
    ahead = disk.ahead_of(1_000)
    ahead.advance(0)
    ahead.close()
    assert all(job.cancelled() for job in disk.jobs)


KEYS = [key_of(number) for number in range(8 * JOB_BLOCKS)]


class Jobs:
    def __init__(self) -> None:
        self.groups: list[list[bytes]] = []

    def begin(self, keys: list[bytes]) -> "asyncio.Future[list[Outcome]]":
        self.groups.append(keys)
        job: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        job.set_result([block_of(KEYS.index(key), 10) for key in keys])
        return job


async def test_a_few_jobs_at_a_time_read_all_in_order() -> None:
    jobs = Jobs()
    ahead = ReadAhead(KEYS, lambda _: 10, jobs.begin)
    ahead.advance(0)
    assert len(jobs.groups) == MAX_JOBS
    for position, key in enumerate(KEYS):
        ahead.advance(position)
        assert await ahead.take(key) == block_of(position, 10)
    assert [len(group) for group in jobs.groups] == [JOB_BLOCKS] * 8


async def test_what_another_get_brought_to_memory_meanwhile_holds_up_no_later_read() -> None:
    jobs = Jobs()
    ahead = ReadAhead(KEYS, lambda _: 10, jobs.begin)
    for position in range(MAX_JOBS * JOB_BLOCKS):
        ahead.advance(position)
        ahead.skip(KEYS[position])
    ahead.advance(MAX_JOBS * JOB_BLOCKS)
    assert ahead.reads(KEYS[MAX_JOBS * JOB_BLOCKS])
    assert [len(group) for group in jobs.groups] == [JOB_BLOCKS] * 2 * MAX_JOBS
