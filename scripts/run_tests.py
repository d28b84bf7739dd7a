"""Runs pytest as told; a few tests that failed get one more run with nothing beside them.

A test that fails only on a machine that does much else at the time is a bug of the test, but none of the change that
happens to be tried then. So when at most MAX_FLAKY tests fail, in their setup or body, exactly these run once more, in
one process. If they pass, the whole has passed, and the last lines name them: each is to be mended. All else is final:
more failures, a second one, a teardown that finds something left behind, a worker that dies, a file that cannot be
collected. Tests that build on earlier ones of their file fail by themselves too, and so are not forgiven either.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

MAX_FLAKY = 3
FORGIVABLE = ("setup", "call")  # xdist calls it "???" where a worker died


class Failures:
    """What failed, and when in its run; hears of tests in xdist's workers too."""

    def __init__(self) -> None:
        self.phases: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.phases.setdefault(report.nodeid, []).append(report.when or "")


def worth_another_run(exit_code: int, phases: dict[str, list[str]]) -> bool:
    """`phases` are those that failed, by test."""
    forgivable = all(phase in FORGIVABLE for failed in phases.values() for phase in failed)
    return exit_code == pytest.ExitCode.TESTS_FAILED and 0 < len(phases) <= MAX_FLAKY and forgivable


def main(argv: Sequence[str]) -> int:
    failures = Failures()
    exit_code = int(pytest.main([*argv], plugins=[failures]))
    if not worth_another_run(exit_code, failures.phases):
        return exit_code
    again = list(failures.phases)
    print(f"\n{len(again)} failed; once more, with nothing beside:", *again, sep="\n  ", flush=True)
    second = subprocess.run([sys.executable, "-m", "pytest", *again])
    if second.returncode == pytest.ExitCode.OK:
        print(f"\n{'!' * 100}\nFLAKY (failed once, passed at the second try; each is a bug):", *again, sep="\n  ")
        print("!" * 100, flush=True)
    return second.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
