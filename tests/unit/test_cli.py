"""The `kvrelay` command finds what was asked for, and every failure is one line with an exit status."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from collections.abc import Sequence

import pytest

from kvrelay import cli
from kvrelay.cli import COMMANDS, Command, main
from kvrelay.errors import ConfigError, UnavailableError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command `try` whose function tests replace."""
    module = types.ModuleType("tried")
    monkeypatch.setitem(sys.modules, "tried", module)
    monkeypatch.setitem(COMMANDS, "try", Command("for this test", "tried:main"))
    return module


def test_a_command_gets_the_rest_of_the_line_and_gives_the_exit_status(command: types.ModuleType) -> None:
    got: list[Sequence[str]] = []

    def run(argv: Sequence[str]) -> int:
        got.append(argv)
        return 7

    command.main = run  # type: ignore[attr-defined]
    assert main(["try", "--help", "x"]) == 7
    assert got == [["--help", "x"]]


@pytest.mark.parametrize(("before", "during"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_grpc_is_told_to_be_quiet_before_it_is_imported_unless_the_user_wants_otherwise(
    before: str | None, during: str, command: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    else:
        monkeypatch.setenv("GRPC_VERBOSITY", before)
    seen: list[str | None] = []
    command.main = lambda argv: seen.append(os.environ.get("GRPC_VERBOSITY")) or 0  # type: ignore[attr-defined]
    assert main(["try"]) == 0
    assert seen == [during]
    program = "import sys, kvrelay.cli; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UnavailableError("no coordinator at 127.0.0.1:7400"), 1, "kvrelay try: no coordinator at 127.0.0.1:7400\n"),
        (ConfigError("--prefill is 0; allowed is [1, 10]"), 2, "kvrelay try: --prefill is 0; allowed is [1, 10]\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failure_is_one_line_and_a_status(
    error: BaseException,
    status: int,
    said: str,
    command: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(argv: Sequence[str]) -> int:
        raise error

    command.main = run  # type: ignore[attr-defined]
    assert main(["try"]) == status
    assert capsys.readouterr() == ("", said)


def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "try", Command("for this test", "torch_that_is_not_there.main:main"))
    assert main(["try"]) == 2
    assert "package 'torch_that_is_not_there' is not installed; `pip install 'kvrelay[all]'`" in capsys.readouterr().err


def test_a_package_that_is_missed_only_later_says_so_too(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: Sequence[str]) -> int:
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    command.main = run  # type: ignore[attr-defined]
    assert main(["try"]) == 2
    assert "package 'torch' is not installed" in capsys.readouterr().err


def test_no_command_explains_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().out
    assert "Start here:" in said
    for name, described in COMMANDS.items():
        assert re.search(rf"^  {name} +{described.help}$", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (["--help"], 0, "kvrelay ask"),
        (["--version"], 0, "kvrelay "),
        (["upp"], 2, "invalid choice: 'upp'"),
        (["--nonsense"], 2, "COMMAND"),
        (["up", "--prefil", "2"], 2, "--prefil"),
        (["up", "--help"], 0, "--port-base N"),
        (["fetch-model", "--help"], 0, "SmolLM2-135M-Instruct"),
    ],
)
def test_help_version_and_words_it_does_not_know(
    argv: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_fetch_model_prints_the_path_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kvrelay.demo_model.fetch", lambda: "/cache/model.gguf")
    assert main(["fetch-model"]) == 0
    assert capsys.readouterr().out == "/cache/model.gguf\n"


def test_every_command_exists() -> None:
    for name, command in COMMANDS.items():
        assert callable(cli._target(command.target)), name


def test_the_package_runs_as_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "kvrelay", "--version"], check=True, capture_output=True, text=True)
    assert run.stdout.startswith("kvrelay ")


def test_help_needs_neither_torch_nor_grpc_nor_a_role() -> None:
    script = (
        "import sys, kvrelay.cli; assert not {'torch', 'grpc', 'coordinator'} & set(sys.modules), sys.modules.keys()"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
