"""Other people's clients in environments of their own, as their users have them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvrelay.demo_model import cache_directory

INSTALL_TIMEOUT_S = 90.0  # six times what the largest takes; a slow network is no reason to hold the others up
SCRIPTS = Path(__file__).resolve().parents[1] / "clients"


def python_environment(name: str, *packages: str, without: tuple[str, ...] = (), torch_from_here: bool = False) -> Path:
    """The bin directory of a virtual environment that has `packages`, less those that they need and are `without`.

    Made once a machine. Skips the test, and says why, where they cannot be installed. `torch_from_here`: what it lacks
    it finds in this environment, behind its own.
    """
    with _place(name) as (place, is_complete):
        if not is_complete:
            uv = [sys.executable, "-m", "uv"]
            _install([*uv, "venv", "--quiet", "--python", sys.executable, str(place)], packages)
            overrides = place / "overrides.txt"
            overrides.write_text("".join(f'{package} ; python_version < "0"\n' for package in without))
            flags = ["--quiet", "--python", str(place / "bin" / "python"), "--override", str(overrides)]
            _install([*uv, "pip", "install", *flags, *packages], packages)
            if torch_from_here:
                [site] = place.glob("lib/python*/site-packages")
                (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return place / "bin"


def node_environment(name: str, *packages: str) -> Path:
    """A directory whose scripts may import npm's `packages`; skips as `python_environment`, also without npm."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    with _place(name) as (place, is_complete):
        if not is_complete:
            place.mkdir()
            _install(["npm", "install", "--silent", "--no-audit", "--prefix", str(place), *packages], packages)
    return place


@contextmanager
def _place(name: str) -> Iterator[tuple[Path, bool]]:
    """An environment's directory and whether it is complete, as it is after this; else there is none yet. Another
    process that makes the same one has ended, or given up at its deadlines, before this begins."""
    place = cache_directory() / "test-clients" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_complete = (place / "complete").exists()
        if not is_complete:
            shutil.rmtree(place, ignore_errors=True)
        yield place, is_complete
        (place / "complete").touch()


def _install(command: list[str], packages: tuple[str, ...]) -> None:
    """Skips the test where it does not work."""
    environment = dict(os.environ, UV_FIND_LINKS=os.environ.get("PIP_FIND_LINKS", ""))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{', '.join(packages)} could not be installed within {INSTALL_TIMEOUT_S:g} s")
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")
