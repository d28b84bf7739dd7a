"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.demo import demo_model_path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF file, downloaded once per machine."""
    return demo_model_path()
