"""What gRPC is told before the coordinator imports it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from coordinator import command
from kvrelay.cli import COMMANDS


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process in which grpc is not imported yet."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60.0, check=True
    )


def test_grpc_is_told_in_time() -> None:
    """It reads its environment once, when it is imported."""
    assert COMMANDS["coordinator"].target == "coordinator.command:main"
    told = run("import sys, kvrelay.cli, coordinator.command; print('grpc' in sys.modules)")
    assert told.stdout == "False\n"


def test_grpc_knows_what_it_is_told() -> None:
    """It says so where it does not: then the coordinator's figures are to be taken anew."""
    channel = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    assert "Unknown experiment" in run(channel, GRPC_EXPERIMENTS="nothing").stderr
    assert "Unknown experiment" not in run(channel, GRPC_EXPERIMENTS=command.EXPERIMENTS).stderr


def test_the_environments_own_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    command.choose_io()
    assert os.environ["GRPC_EXPERIMENTS"] == ""
    monkeypatch.delenv("GRPC_EXPERIMENTS")
    command.choose_io()
    assert os.environ["GRPC_EXPERIMENTS"] == "-event_engine_client"
