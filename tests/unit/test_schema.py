"""What every file under proto/ must look like."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCHEMA = sorted((Path(__file__).resolve().parents[2] / "proto").rglob("*.proto"))
_FIELD = re.compile(r"\s+(?:optional |repeated )?[\w.]+(?:<[^>]+>)? (?P<name>\w+) = \d+;")
_RPC = re.compile(r"\s+rpc (?P<name>\w+)\(")


def uncommented(text: str) -> list[str]:
    """Fields and calls, one a line, that have no comment above them."""
    lines = text.splitlines()
    found = ((lines[index - 1].strip(), _FIELD.match(line) or _RPC.match(line)) for index, line in enumerate(lines))
    return [declared["name"] for above, declared in found if declared and not above.startswith("//")]


@pytest.mark.parametrize("path", SCHEMA, ids=lambda path: path.name)
def test_every_field_and_every_call_has_a_comment(path: Path) -> None:
    assert uncommented(path.read_text()) == []


def test_a_field_without_one_is_found() -> None:
    text = """
service S {
  rpc Do(A) returns (A);
}
message A {
  // Said.
  repeated uint32 said = 1;
  map<uint32, double> unsaid = 2;
  oneof one {
    kvrelay.pb.A also_unsaid = 3;
  }
  optional string not_either = 4;
}
"""
    assert uncommented(text) == ["Do", "unsaid", "also_unsaid", "not_either"]


def test_there_are_six_files() -> None:
    assert [path.stem for path in SCHEMA] == ["cluster", "decode", "inference", "kvstore", "prefill", "types"]
