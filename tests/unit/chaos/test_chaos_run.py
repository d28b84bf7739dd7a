"""What a run starts ends with it."""

from __future__ import annotations

import multiprocessing
import time

from tests.chaos.run import one_process

LONG_S = 300.0


def test_a_computation_is_not_waited_for_when_the_run_ends_early() -> None:
    started = time.monotonic()
    with one_process() as pool:
        pool.submit(time.sleep, LONG_S)
        assert multiprocessing.active_children()
    assert time.monotonic() - started < LONG_S / 2
    assert not multiprocessing.active_children()
