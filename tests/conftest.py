"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.demo import demo_model_path

settings.register_profile("kvrelay", deadline=None)  # a busy machine is slow; pytest's timeout bounds what hangs
settings.load_profile("kvrelay")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, downloaded once per machine."""
    return demo_model_path()
