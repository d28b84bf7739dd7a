"""What most end-to-end tests begin with: a tiny random model, and an engine that answers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceEngine:
    return ReferenceEngine(model)
