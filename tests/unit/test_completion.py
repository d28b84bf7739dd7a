"""The script that completes commands, in a real bash."""

from __future__ import annotations

import subprocess

import pytest

from kvrelay import completion
from kvrelay.cli import COMMANDS


def completed(line: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What bash would offer for the last word of `line`."""
    assert completion.main(["bash"]) == 0
    script = capsys.readouterr().out
    words = line.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_kvrelay; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=30, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvrelay st", {"status", "store"}),
        ("kvrelay status --w", {"--watch"}),
        ("kvrelay ask --json", {"--json", "--json-object", "--json-schema"}),
        ("kvrelay coordinator --http-p", {"--http-port"}),
        ("kvrelay completion ", {"bash", "zsh"}),
    ],
)
def test_bash_is_offered(line: str, offered: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert completed(line, capsys) == offered


def test_zsh_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef kvrelay")
    assert all(f"    {name}:'" in script for name in COMMANDS)
