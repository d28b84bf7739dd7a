"""The committed kvrelay/pb is what the generator makes of proto/ today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generated(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.glob("*_pb2*.py*") if path.suffix in (".py", ".pyi")}


def test_generated_code_has_not_drifted_from_the_schema(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "generate_proto.py", "--out", tmp_path], check=True)

    fresh, committed = generated(tmp_path / "kvrelay" / "pb"), generated(ROOT / "kvrelay" / "pb")

    assert sorted(fresh) == sorted(committed), "run `make proto`"
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make proto`"
    assert len(fresh) == 4 * 6  # messages and services, each with its stub, of six schema files
