"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.demo import demo_model_path

# As `kvrelay.cli` does; test modules import grpc after this one, and child processes inherit it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# An example may take long where other work has the cores; what it shows does not depend on that.
settings.register_profile("kvrelay", deadline=None)
settings.load_profile("kvrelay")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, downloaded once per machine."""
    return demo_model_path()
