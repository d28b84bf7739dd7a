"""`kvrelay keys new`."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from coordinator.api_keys import parse_keys
from coordinator.identity import Scope
from kvrelay import keys
from kvrelay.errors import ConfigError, UnauthenticatedError


def test_a_key_and_its_line_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["new", "--tenant", "acme", "--id", "one", "--scopes", "infer,admin", "--max-open", "3"]) == 0
    line, key = capsys.readouterr().out.splitlines()
    identity = parse_keys(line.encode()).identify(key, 0.0)
    assert (identity.tenant.name, identity.name, identity.limits.max_open) == ("acme", "one", 3)
    assert identity.scopes == {Scope.INFER, Scope.ADMIN}


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    assert keys.main(["new", "--tenant", "acme", "--id", "one", "--json", "--file", str(file)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["line"] in file.read_text()
    assert parse_keys(file.read_bytes()).identify(made["key"], 0.0).name == "one"


def test_a_key_that_ends_ends(capsys: pytest.CaptureFixture[str]) -> None:
    keys.main(["new", "--tenant", "acme", "--expires-in", "1s"])
    line, key = capsys.readouterr().out.splitlines()
    with pytest.raises(UnauthenticatedError, match="has expired"):
        parse_keys(line.encode()).identify(key, 4_000_000_000.0)


@pytest.mark.parametrize("lasts", ["0", "0.5s", "3651d", "never"])
def test_one_that_would_end_at_once_or_never_is_refused(lasts: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        keys.main(["new", "--tenant", "acme", "--expires-in", lasts])
    printed = capsys.readouterr()
    assert f"{lasts!r} is " in printed.err
    assert printed.out == ""


def test_a_file_gets_a_line_more_and_only_its_owner_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    for name in ("one", "two"):
        keys.main(["new", "--tenant", "acme", "--id", name, "--file", str(file)])
    first, second = capsys.readouterr().out.splitlines()
    known = parse_keys(file.read_bytes())
    assert (known.identify(first, 0.0).name, known.identify(second, 0.0).name) == ("one", "two")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_line_whose_end_is_missing_is_ended_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("# keys of acme")
    keys.main(["new", "--tenant", "acme", "--file", str(file)])
    assert len(parse_keys(file.read_bytes())) == 1


def test_an_id_that_the_file_has_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    argv = ["new", "--tenant", "acme", "--id", "one", "--file", str(file)]
    keys.main(argv)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="not TOML"):
        keys.main(argv)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--id", "a b"], "the key's id is 'a b'"),
        (["--tenant", ""], "tenant is ''"),
        (["--max-open", "-1"], "max_open is -1"),
    ],
)
def test_what_no_file_could_hold_is_refused(more: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        keys.main(["new", "--tenant", "acme", *more])


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write to .*keys\.toml: No such file"):
        keys.main(["new", "--tenant", "acme", "--file", str(tmp_path / "none" / "keys.toml")])
