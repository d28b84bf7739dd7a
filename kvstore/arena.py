"""Memory for slabs, mapped once: slots of a slab's size, taken and given back without the allocator.

A slot is given back when the last view of it is gone, not when its block is evicted: a Get that still sends from it,
or a write to disk, keeps it, and nobody ever sees the bytes of the block that comes after. The mapping is anonymous,
so touching it can not fail for want of disk (SIGBUS), as a file's can.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

ALIGN_BYTES = 64  # a cache line; slabs of real layouts are multiples of it


@dataclass(frozen=True, slots=True)
class Slot:
    """`view` is as long as what was asked for. Whoever drops it and all views made of it gives the slot back."""

    offset: int
    view: memoryview


class _Taken(weakref.ref[Any]):
    """What is known of a slot while any view of it is left. A slot of this size may come back from any thread."""

    __slots__ = ("num_bytes", "offset")

    offset: int
    num_bytes: int


class Arena:
    """`capacity_bytes` of address space, filled as it is used. One owner; the views may end anywhere."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._map = _map(capacity_bytes) if capacity_bytes else None
        self._extents: list[tuple[int, int]] = [(0, capacity_bytes)] if capacity_bytes else []  # offset, size: no slots
        self._free: dict[int, list[int]] = {}  # slots that came back, by their size; most often there is one size
        self._taken: dict[int, _Taken] = {}
        self._returned: deque[_Taken] = deque()
        self._mixed = False  # whether slots came back that are in no extent

    def take(self, num_bytes: int) -> Slot | None:
        """A slot; None where no free bytes lie together (`window` tells what to drop for it)."""
        size = _slot_bytes(num_bytes)
        self._settle()
        offset = self._find(size)
        if offset is None or self._map is None:
            return None
        cells = (ctypes.c_ubyte * num_bytes).from_buffer(self._map, offset)
        taken = _Taken(cells, self._returned.append)
        taken.offset, taken.num_bytes = offset, size
        self._taken[offset] = taken
        return Slot(offset, memoryview(cells).cast("B"))

    def window(self, num_bytes: int, may_go: Callable[[int], bool]) -> list[int] | None:
        """Offsets of the taken slots of fewest bytes that, if all are given back, leave `num_bytes` together.

        None where `may_go` leaves no such place.
        """
        size = _slot_bytes(num_bytes)
        self._settle()
        offsets = sorted(self._taken)
        ends = [0, *(offset + self._taken[offset].num_bytes for offset in offsets)]
        best: tuple[int, list[int]] | None = None
        for start in ends:
            if start + size > self.capacity_bytes:
                continue
            found = offsets[bisect_right(offsets, start - 1) : bisect_right(offsets, start + size - 1)]
            num_lost = sum(self._taken[offset].num_bytes for offset in found)
            if (best is None or num_lost < best[0]) and all(map(may_go, found)):
                best = (num_lost, found)
        return None if best is None else best[1]

    def check(self) -> None:
        """Proves that slots and free places fill the arena and nothing overlaps. Raises AssertionError."""
        self._settle()
        places = [*self._extents, *((taken.offset, taken.num_bytes) for taken in self._taken.values())]
        places += [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        end = 0
        for offset, size in sorted(places):
            assert offset == end, f"arena: place at {offset}, where {end} was due"
            end = offset + size
        assert end == self.capacity_bytes, f"arena: places end at {end} of {self.capacity_bytes}"

    def _find(self, size: int) -> int | None:
        free = self._free.get(size)
        if free:
            return free.pop()
        offset = self._carve(size)
        if offset is None and self._mixed:
            self._merge()
            offset = self._carve(size)
        return offset

    def _carve(self, size: int) -> int | None:
        for index, (offset, num_bytes) in enumerate(self._extents):
            if num_bytes >= size:
                if num_bytes > size:
                    self._extents[index] = (offset + size, num_bytes - size)
                else:
                    del self._extents[index]
                return offset
        return None

    def _merge(self) -> None:
        """All free slots become extents, those that touch one: what one size left another may use."""
        places = self._extents + [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        self._extents, self._free, self._mixed = [], {}, False
        for offset, size in sorted(places):
            if self._extents and sum(self._extents[-1]) == offset:
                self._extents[-1] = (self._extents[-1][0], self._extents[-1][1] + size)
            else:
                self._extents.append((offset, size))

    def _settle(self) -> None:
        while self._returned:
            taken = self._returned.popleft()
            del self._taken[taken.offset]
            self._free.setdefault(taken.num_bytes, []).append(taken.offset)
            self._mixed = True


def _map(num_bytes: int) -> mmap.mmap:
    """Private, so that the kernel may use large pages: the first touch of them all costs a 500th of the faults."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _slot_bytes(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
