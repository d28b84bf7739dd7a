"""Reads of a chain's blocks on disk, begun before they are due: several blocks a job, a few jobs at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvstore.disk import Outcome

Job: TypeAlias = "asyncio.Future[list[Outcome]]"

JOB_BLOCKS = 32
JOB_BYTES = 1 << 20  # or one block
MAX_JOBS = 3  # of one Get


class ReadAhead:
    """`size_on_disk` tells a block's bytes if it is to be read from disk, else 0; `read` begins a job."""

    def __init__(
        self, keys: Sequence[bytes], size_on_disk: Callable[[bytes], int], read: Callable[[list[bytes]], Job]
    ) -> None:
        self._keys = keys
        self._size_on_disk = size_on_disk
        self._read = read
        self._next = 0  # of _keys, the first that nobody looked at
        self._jobs: dict[bytes, tuple[Job, int]] = {}  # by block: its job, and its place in it
        self._num_left: dict[Job, int] = {}  # blocks of a job that nobody has taken

    def advance(self, position: int) -> None:
        """The block at `position` is due."""
        self._next = max(self._next, position)
        while self._next < len(self._keys) and len(self._num_left) < MAX_JOBS:
            if self._next - position > MAX_JOBS * JOB_BLOCKS:
                return
            group = self._next_group()
            if group:
                job = self._read(group)
                self._jobs |= {key: (job, place) for place, key in enumerate(group)}
                self._num_left[job] = len(group)

    async def take(self, key: bytes) -> Outcome:
        """What a job found. Raises KeyError if none reads this block."""
        job, place = self._pop(key)
        return (await job)[place]

    def skip(self, key: bytes) -> None:
        """The block was found elsewhere: another Get brought it to memory meanwhile."""
        if key in self._jobs:
            self._pop(key)

    def reads(self, key: bytes) -> bool:
        return key in self._jobs

    def close(self) -> None:
        """Gives up what has not begun."""
        for job in self._num_left:
            job.cancel()

    def _pop(self, key: bytes) -> tuple[Job, int]:
        job, place = self._jobs.pop(key)
        self._num_left[job] -= 1
        if not self._num_left[job]:
            del self._num_left[job]
        return job, place

    def _next_group(self) -> list[bytes]:
        """Neighbours that are on disk; passes over one block at least."""
        group: list[bytes] = []
        num_bytes = 0
        while self._next < len(self._keys) and len(group) < JOB_BLOCKS:
            key = self._keys[self._next]
            size = 0 if key in self._jobs else self._size_on_disk(key)
            num_bytes += size
            if group and (not size or num_bytes > JOB_BYTES):
                break
            self._next += 1
            if not size:
                break
            group.append(key)
        return group
