"""The options that benchmarks with rows and rounds share."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.options import chosen_of, make_parser


def test_rows_are_chosen_by_name_and_come_in_their_own_order() -> None:
    assert chosen_of(("a", "b", "c"))("c,a") == ("a", "c")
    with pytest.raises(argparse.ArgumentTypeError, match="d is none of a,b"):
        chosen_of(("a", "b"))("a,d")


def test_a_group_stands_for_its_rows() -> None:
    chosen = chosen_of(("a", "b", "c"), {"both": ("c", "b")})
    assert chosen("both") == ("b", "c")
    assert chosen("both,a,b") == ("a", "b", "c")
    with pytest.raises(argparse.ArgumentTypeError, match="d is none of a,b,c,both"):
        chosen("d")


def test_all_rows_are_measured_unless_some_are_chosen() -> None:
    parser = make_parser("some", None, ("a", "b"), num_rounds=3)
    options = parser.parse_args([])
    assert (options.rows, options.repeat, options.quick, options.model) == (("a", "b"), None, False, None)
    options = parser.parse_args(["--rows", "b", "--repeat", "2", "--model", "m.gguf"])
    assert (options.rows, options.repeat, options.model) == (("b",), 2, Path("m.gguf"))


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser("some", None, ("a",), num_rounds=3).parse_args(["--repeat", "0"])
    assert "0 is no number of rounds; allowed is at least 1" in capsys.readouterr().err
