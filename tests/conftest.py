"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.demo import demo_model_path

# As `kvrelay.cli` does; test modules import grpc after this one, and child processes inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Without a GPU kernels are interpreted. Triton reads this at its import, which any test module may be first to do.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("kvrelay", deadline=None)  # a busy machine is slow; pytest's timeout bounds what hangs
settings.load_profile("kvrelay")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, downloaded once per machine."""
    return demo_model_path()
