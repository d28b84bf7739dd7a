"""When tests that failed are given another run, and what comes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.run_tests import worth_another_run

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_tests.py"
FLAKY = "FLAKY (failed once, passed at the second try; each is a bug):"

ONCE = """
from pathlib import Path

def test_it():
    seen = Path("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_other():
    with Path("others").open("a") as file:
        file.write("x")
"""
ALWAYS = "def test_it():\n    assert False\n"
LEFT_BEHIND = """
import pytest
from pathlib import Path

@pytest.fixture(scope="module")
def thing():
    yield
    first = not Path("seen").exists()
    Path("seen").touch()
    assert not first

def test_it(thing):
    pass
"""


def run(directory: Path, text: str, *argv: str) -> tuple[int, str]:
    (directory / "pytest.ini").write_text("[pytest]\n")
    (directory / "test_one.py").write_text(text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most of the time would go into them
    command = [sys.executable, str(SCRIPT), "-p", "no:cacheprovider", *argv]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_what_fails_once_passes_alone_and_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, ONCE, "-p", "xdist.plugin", "-n", "1")
    assert code == 0
    assert said.splitlines()[-3:-1] == [FLAKY, "  test_one.py::test_it"]
    assert (tmp_path / "others").read_text() == "x", "what passed does not run again"


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    code, said = run(tmp_path, ALWAYS)
    assert code == 1
    assert said.count("1 failed in") == 2
    assert FLAKY not in said


def test_a_teardown_that_finds_something_is_final(tmp_path: Path) -> None:
    code, said = run(tmp_path, LEFT_BEHIND)
    assert code == 1
    assert "once more" not in said


def test_a_file_that_cannot_be_collected_is_final(tmp_path: Path) -> None:
    code, said = run(tmp_path, "import nothing_of_that_name")
    assert code == 2
    assert "once more" not in said


@pytest.mark.parametrize(
    ("exit_code", "phases", "worth"),
    [
        (1, {"a": ["call"]}, True),
        (1, {"a": ["call"], "b": ["setup"], "c": ["call"]}, True),
        (1, {"a": ["call"], "b": ["call"], "c": ["call"], "d": ["call"]}, False),
        (1, {"a": ["call", "teardown"]}, False),
        (1, {"a": ["???"]}, False),  # its worker died
        (1, {}, False),
        (2, {"a": ["call"]}, False),
        (0, {}, False),
        (5, {}, False),
    ],
)
def test_few_failures_of_setup_or_body_are_worth_another_run(
    exit_code: int, phases: dict[str, list[str]], worth: bool
) -> None:
    assert worth_another_run(exit_code, phases) is worth
