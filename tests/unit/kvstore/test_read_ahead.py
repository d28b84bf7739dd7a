"""Reads that are begun before they are due, on jobs that a test ends."""

import asyncio

from kvstore.disk import Outcome
from kvstore.read_ahead import JOB_BLOCKS, MAX_JOBS, ReadAhead
from tests.support.store_blocks import block_of, key_of

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
