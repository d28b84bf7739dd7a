"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.demo import demo_model_path

# As `kvrelay.cli` does; test modules import grpc after this one, and child processes inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# gRPC's fork handlers start its threads anew in a child that is about to exec, where they now and then find their files
# closed and abort it. Nothing here forks to go on with gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Without a GPU kernels are interpreted. Triton reads this at its import, which any test module may be first to do.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A busy machine is slow, and slow to draw; pytest's timeout bounds what hangs.
settings.register_profile("kvrelay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvrelay")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure's report parses source. Should garbage collection run meanwhile and a finalizer format a traceback,
    which parses too, older CPython 3.11 raises "AST constructor recursion depth mismatch" (python/cpython#106905), and
    pytest ends all tests with INTERNALERROR."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, downloaded once per machine."""
    return demo_model_path()
