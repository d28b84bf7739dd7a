"""docs/reliability.md names tests; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`((?:unit|integration|e2e|gpu)/[\w/]+\.py)::(\w+)`")


def test_every_test_that_the_tables_name_is_there() -> None:
    named = NAMED.findall((TESTS.parent / "docs" / "reliability.md").read_text())
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if not defines(TESTS / path, name)]
    assert not missing


def defines(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE) is not None
