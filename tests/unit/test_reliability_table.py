"""docs/reliability.md names tests and files; each of them exists, no row is without one, and no section is empty."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text()
FILE = r"(?:unit|integration|e2e|gpu)/[\w/]+\.py"
TEST = re.compile(rf"`({FILE})::(\w+)`")
HEADING = re.compile(r"^(#+) .*$", re.MULTILINE)
REPORTS = "## Public bug reports"


def test_every_test_that_the_page_names_is_there() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 50
    assert not [f"{path}::{name}" for path, name in named if not defines(TESTS / path, name)]


def test_every_file_that_the_page_names_is_there() -> None:
    assert not [path for path in re.findall(rf"`({FILE})", PAGE) if not (TESTS / path).exists()]


def test_every_report_is_held_by_a_test() -> None:
    rows = rows_of(section(PAGE, REPORTS))
    assert len(rows) > 35
    assert not [row for row in rows if not TEST.search(last_cell(row))]


def test_no_section_is_empty() -> None:
    assert empty_sections(PAGE) == []


@pytest.mark.parametrize(
    ("page", "empty"),
    [
        ("# A\n\n## B\n\n## C\ntext\n", ["## B"]),
        ("# A\n\n## B\n\n### C\n\ntext\n", []),
        ("# A\ntext\n\n## B\n\n", ["## B"]),
        ("# A\n\n## B\n\n### C\n\n## D\ntext", ["### C"]),
    ],
)
def test_a_section_is_empty_when_no_text_and_no_deeper_heading_follows(page: str, empty: list[str]) -> None:
    assert empty_sections(page) == empty


def test_a_row_without_a_test_is_found() -> None:
    (row,) = rows_of("| report | held by |\n| --- | --- |\n| `unit/a.py::test_a` | nothing |\n")
    assert not TEST.search(last_cell(row))


def defines(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE) is not None


def section(page: str, heading: str) -> str:
    """With the deeper ones in it."""
    _, _, rest = page.partition(f"\n{heading}\n")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows_of(text: str) -> list[str]:
    """Of tables whose last column says what holds a row; without their headers."""
    rows: list[str] = []
    for table in re.split(r"\n(?!\|)", text):
        lines = [line for line in table.splitlines() if line.startswith("|")]
        if lines and last_cell(lines[0]) == "held by":
            rows += lines[2:]
    return rows


def last_cell(row: str) -> str:
    return row.strip().strip("|").rpartition("|")[2].strip()


def empty_sections(page: str) -> list[str]:
    headings = list(HEADING.finditer(page))
    ends = [following.start() for following in headings[1:]] + [len(page)]
    deeper = [len(b[1]) > len(a[1]) for a, b in itertools.pairwise(headings)] + [False]
    return [
        heading[0]
        for heading, end, has_deeper in zip(headings, ends, deeper, strict=True)
        if not has_deeper and not page[heading.end() : end].strip()
    ]
