"""Many threads inside at a time, until one wants to be alone: who reads a file, and who puts another there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Whoever wants to be alone waits for those inside, and lets nobody in meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._closed = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()
