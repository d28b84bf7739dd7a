"""Compiles kvrelay/model/cpp/decoder.cpp, once for each instruction set. Part of every install; `make native` by hand.

What was built since this file changed, from the source as it is now, stays.
Without a C++ compiler the package is installed all the same: nodes then serve with plain torch, and say so.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = ("-std=c++20", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized")  # the last: false alarms in GCC 12's own headers
STANDALONE = ("-static-libstdc++", "-static-libgcc")  # the library runs where no compiler is installed


def build_native(warn: Callable[[str], object]) -> bool:
    """Whether the libraries are there now. A missing compiler is told, one that fails is raised: CalledProcessError."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        warn("the native decoder is written for Linux on x86-64; nodes will serve with plain torch")
        return False
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        warn(f"{compiler[0]} was not found: nodes will serve with plain torch, several times slower on CPUs")
        return False
    sys.path.insert(0, str(ROOT))
    import fcntl  # not everywhere

    from kvrelay.model.native import DIRECTORY

    with (DIRECTORY / "decoder.cpp").open("rb") as source:
        fcntl.flock(source, fcntl.LOCK_EX)  # whoever builds at this moment builds for us too
        _build(compiler)
    return True


def _build(compiler: list[str]) -> None:
    from kvrelay.model.native import DIRECTORY, VARIANTS, source_fingerprint

    stamp, commands, targets = source_fingerprint(), [], {}
    for variant in VARIANTS:
        target = DIRECTORY / variant.file_name
        if _is_current(target, stamp):
            continue
        draft = target.with_suffix(".draft")  # a running node has the old file mapped
        command = [*compiler, *FLAGS, *WARNINGS, *STANDALONE, *variant.compiler_flags, f'-DKVRELAY_SOURCE="{stamp}"']
        commands.append([*command, str(DIRECTORY / "decoder.cpp"), "-o", str(draft)])
        targets[draft] = target
    _run_together(commands)
    for draft, target in targets.items():
        draft.replace(target)


def _is_current(target: Path, stamp: str) -> bool:
    if not target.exists() or target.stat().st_mtime < Path(__file__).stat().st_mtime:
        return False
    return stamp.encode() in target.read_bytes()


def _run_together(commands: list[list[str]]) -> None:
    """Raises CalledProcessError of the first that failed, when all have ended."""
    running = [subprocess.Popen(command) for command in commands]
    codes = [process.wait() for process in running]
    for code, command in zip(codes, commands, strict=True):
        if code:
            raise subprocess.CalledProcessError(code, command)


if __name__ == "__main__":
    try:
        sys.exit(not build_native(lambda text: sys.stderr.write(f"{text}\n")))
    except subprocess.CalledProcessError:
        sys.exit("the compiler failed, see above; g++ 11 or newer is needed")
