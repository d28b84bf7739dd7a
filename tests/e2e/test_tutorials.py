"""Every command of the tutorials does what it is there for, as it stands, on a real cluster with the demo model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, Cluster, running
from tests.support.demo import demo_model_path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
COMMAND_TIMEOUT_S = 120.0
DEFAULT_HTTP = "http://127.0.0.1:8000"  # what a cluster of a reader's own has


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(Cluster(demo_model_path(), tmp_path_factory.mktemp("tutorials"))) as started:
        yield started


def blocks(tutorial: Path) -> list[tuple[str, str]]:
    """Language and text of those to be run; one with a title is for another terminal."""
    return re.findall(r"^```(sh|python)\n(.*?)^```$", tutorial.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_the_commands_of_a_tutorial_work(tutorial: Path, cluster: Cluster) -> None:
    environment = {
        **os.environ,
        "KVRELAY_ADDRESS": cluster.address,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    found = blocks(tutorial)
    assert found
    for language, text in found:
        own = text.replace(DEFAULT_HTTP, f"http://127.0.0.1:{cluster.http_ports[0]}")
        command = [sys.executable, "-c", own] if language == "python" else ["bash", "-euo", "pipefail", "-c", own]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=environment)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout or "/dev/null" in text
        assert '"error"' not in done.stdout, done.stdout
