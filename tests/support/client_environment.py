"""Other people's clients in environments of their own, as their users have them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvrelay.demo_model import cache_directory

INSTALL_TIMEOUT_S = 240.0
SCRIPTS = Path(__file__).resolve().parents[1] / "clients"


def python_environment(name: str, *packages: str, without: tuple[str, ...] = (), torch_from_here: bool = False) -> Path:
    """The bin directory of a virtual environment that has `packages`, less those that they need and are `without`.

    Made once a machine. Skips the test, and says why, where they cannot be installed. `torch_from_here`: what it lacks
    it finds in this environment, behind its own.
    """
    place = cache_directory() / "test-clients" / name
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        uv = [sys.executable, "-m", "uv"]
        _install([*uv, "venv", "--quiet", "--python", sys.executable, str(place)], packages)
        overrides = place / "overrides.txt"
        overrides.write_text("".join(f'{package} ; python_version < "0"\n' for package in without))
        flags = ["--quiet", "--python", str(place / "bin" / "python"), "--override", str(overrides)]
        _install([*uv, "pip", "install", *flags, *packages], packages)
        if torch_from_here:
            [site] = place.glob("lib/python*/site-packages")
            (site / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        (place / "complete").touch()
    return place / "bin"


def node_environment(name: str, *packages: str) -> Path:
    """A directory whose scripts may import npm's `packages`; skips as `python_environment`, also without npm."""
    place = cache_directory() / "test-clients" / name
    if not (place / "complete").exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _install(["npm", "install", "--silent", "--no-audit", "--prefix", str(place), *packages], packages)
        (place / "complete").touch()
    return place


def _install(command: list[str], packages: tuple[str, ...]) -> None:
    """Another process may be at it too: uv and npm take turns by themselves."""
    environment = dict(os.environ, UV_FIND_LINKS=os.environ.get("PIP_FIND_LINKS", ""))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{', '.join(packages)} could not be installed within {INSTALL_TIMEOUT_S:g} s")
    if done.returncode:
        pytest.skip(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")
