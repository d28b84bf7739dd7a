"""What the README promises is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrelay.cli import COMMANDS
from kvrelay.config_table import BEGIN, END, renewed, tables

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
DOCUMENTS = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]


def test_the_configuration_tables_are_those_of_the_classes() -> None:
    assert renewed(README) == README, "run `make config-table`"


def test_the_tables_name_each_setting_where_it_belongs_and_once() -> None:
    sections = re.split(r"^\*\*(.+)\*\*$", tables(), flags=re.MULTILINE)
    rows = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert list(rows) == [
        "Every role",
        "Prefill and decode nodes, beside those",
        "`kvrelay coordinator`",
        "`kvrelay prefill-node`",
        "`kvrelay decode-node`",
        "`kvrelay kvstore`",
    ]
    assert "| `--grace-s` | `KVRELAY_GRACE_S` |" in rows["Every role"]
    assert "| `--dtype` | `KVRELAY_DTYPE` |" in rows["Prefill and decode nodes, beside those"]
    assert "| `--lease-s` | `KVRELAY_DECODE_NODE_LEASE_S` |" in rows["`kvrelay decode-node`"]
    assert tables().count("`--grace-s`") == 1
    assert tables().count("`--dtype`") == 1


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="markers"):
        renewed(f"{BEGIN} but no end")
    with pytest.raises(ValueError, match="markers"):
        renewed(END)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    named = re.findall(r"`((?:kvrelay|coordinator|prefill_node|decode_node|kvstore|proto|docs|tests)/[\w./-]*)`", text)
    missing = [name for name in links if not (ROOT / document).parent.joinpath(name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_every_command_and_target_that_is_named_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= set(targets)
    used = set(re.findall(r"^(?:\.venv/bin/)?kvrelay ([a-z-]+)", README, flags=re.MULTILINE))
    assert used
    assert used <= set(COMMANDS)


def test_every_document_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:")[2]
    listed = sorted(re.findall(r": ([\w/.-]+\.md)$", navigation, flags=re.MULTILINE))
    assert listed == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
