"""A short run of `make chaos` with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import settings_of
from tests.chaos.run import run_chaos

pytestmark = [pytest.mark.e2e, pytest.mark.alone, pytest.mark.timeout(600)]

SEED = 3349  # whose plan has every kind of fault, and `kill -9` of every role
SECONDS = 50.0


async def test_whatever_dies_every_answer_is_right_and_nothing_is_left(tmp_path: Path) -> None:
    said: list[str] = []
    violations = await run_chaos(settings_of(SEED, SECONDS, tmp_path), said.append)
    assert not violations, "\n".join(said)
