"""Writes kvrelay/pb from proto/: python scripts/generate_proto.py [--out DIR]

Needs grpcio-tools and mypy-protobuf in the versions pyproject.toml pins; a test compares their output with what is
committed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="directory to write kvrelay/pb under (default: here)")
    out = parser.parse_args(argv).out
    plugins = Path(sysconfig.get_path("scripts"))
    sources = sorted((ROOT / "proto" / "kvrelay" / "pb").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command += [f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")]
    return subprocess.run([*command, *map(str, sources)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
