"""Triton's interpreter takes more than its compiler does: the kernels are compiled for the GPU they are meant for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed; it comes with torch's CUDA builds")

ROOT = Path(__file__).resolve().parents[3]
SHARED_BYTES_OF_AN_H200 = 227 * 1024


def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels"],
        cwd=ROOT,
        env=environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    compiled = [line.split() for line in result.stdout.splitlines()]
    assert len(compiled) == 3 * 2 + 2 * 4
    assert {name for name, _ in compiled} == {
        "_attend_part",
        "_merge_parts",
        "_add_and_normalize",
        "_rotate_and_store",
        "_gate",
    }
    assert max(int(num_bytes) for _, num_bytes in compiled) < SHARED_BYTES_OF_AN_H200
