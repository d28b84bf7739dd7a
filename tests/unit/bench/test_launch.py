"""A worker runs in a process of its own, and its report is what comes back."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from bench.engine.case import Case, Task
from bench.engine.engines import Engine
from bench.engine.launch import WorkerFailedError, busy_worker, run_worker

ENGINE = Engine("idle", "idle", Path(sys.executable), "tests.support.bench_worker", Path("model"))
CASES = (Case("prefill", 128), Case("decode", 256, batch=4))


def task(model: str = "fine") -> Task:
    return Task(model, 1, CASES, num_steps=8, vocab_size=1000, seed=0, spawned_at=0.0)


def test_a_report_has_a_sample_of_each_case_and_facts_of_the_process() -> None:
    report = run_worker(ENGINE, task())

    assert list(report.samples) == ["prefill 128", "decode 4 at 256"]
    assert [len(sample.gaps_s) for sample in report.samples.values()] == [0, 8]
    assert all(sample.tokens_per_s > 0 for sample in report.samples.values())
    assert 0 < report.ready_s < 60
    assert 2**20 < report.peak_rss_bytes < 2**30
    assert report.facts == {"weights_bytes": 7}
    assert report.versions == {"pytest": version("pytest")}


def test_a_worker_that_fails_is_quoted() -> None:
    with pytest.raises(WorkerFailedError, match=r"idle ended with 1: (.|\n)*RuntimeError: the model is broken$"):
        run_worker(ENGINE, task("broken"))


def test_a_busy_worker_works_until_the_block_ends_and_tells_its_speed() -> None:
    with busy_worker(ENGINE, task()) as tokens_per_s:
        assert tokens_per_s == []

    assert tokens_per_s[0] > 0
