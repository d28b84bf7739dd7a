"""How many blocks may leave by when, and the CPU time of a process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest

from bench.handoff.decoding import NUM_WARM_UP_STEPS, speed
from bench.handoff.pace import blocks_due, cpu_seconds, name_of
from bench.handoff.transfers import Meter


@pytest.mark.parametrize(
    ("bytes_per_s", "elapsed_s", "due"),
    [(1_000.0, 0.0, 0), (1_000.0, 0.299, 2), (1_000.0, 0.3, 3), (1_000.0, 60.0, 10), (math.inf, 0.0, 10)],
)
def test_blocks_become_final_at_the_rate_that_is_asked_for(bytes_per_s: float, elapsed_s: float, due: int) -> None:
    assert blocks_due(bytes_per_s, elapsed_s, slab_bytes=100, num_blocks=10) == due


def test_rates_have_names() -> None:
    assert [name_of(rate) for rate in (0.0, 25e6, math.inf)] == ["no handoff", "25 MB/s", "full rate"]


def test_the_cpu_time_of_another_process_is_that_process_s() -> None:
    program = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert 0.3 <= cpu_seconds(process.pid) < 0.6
        process.communicate(b"", timeout=30)
    with pytest.raises(OSError, match=r"."):
        cpu_seconds(process.pid)


def test_a_meter_counts_what_lies_between_start_and_stop() -> None:
    meter = Meter(os.getpid())
    _burn(0.1)
    for num_bytes in (100, 300):
        meter.start()
        _burn(0.05)
        meter.stop(num_bytes)
    report = meter.report()
    assert 0.1 <= report["sender_cpu_s"] * 400 < 0.2
    assert report["receiver_cpu_s"] == pytest.approx(report["sender_cpu_s"], rel=0.2)
    assert report["bytes_per_s"] <= 1.05 * 400 / 0.1  # the kernel's clocks of CPU and wall time differ by a little


def _burn(cpu_s: float) -> None:
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass


def test_decode_speed_is_that_of_full_steps_after_those_that_warm_up() -> None:
    joining = [(0.5, 1), (0.9, 7)]
    warming = [(1.0 + 0.1 * step, 8) for step in range(NUM_WARM_UP_STEPS)]
    counted = [(10.0 + 0.02 * step, 8) for step in range(5)]
    leaving = [(20.0, 8), (30.0, 3)]
    assert speed([*joining, *warming, *counted, *leaving], 8, 4) == pytest.approx(50.0)


def test_too_few_full_steps_are_no_measurement() -> None:
    steps = [(0.1 * step, 8) for step in range(NUM_WARM_UP_STEPS + 4)]
    with pytest.raises(ValueError, match="12 of 12 steps gave all 8 sequences a token; too few"):
        speed(steps, 8, 4)
