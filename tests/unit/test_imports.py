"""The house's import rules hold, and the check of them can fail. Rooms without torch import where torch is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.arrows import modules, violations

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TORCH = ("coordinator", "kvstore", "kvrelay.rpc", "kvrelay.kv", "kvrelay.pb", "kvrelay.tokenizer",
                 "kvrelay.detokenizer", "kvrelay.client", "kvrelay.cli", "kvrelay.ask", "kvrelay.cancel",
                 "kvrelay.status", "kvrelay.store_command", "kvrelay.up", "kvrelay.plan", "kvrelay.capacity",
                 "kvrelay.model.config", "kvrelay.model.kv_shape", "kvrelay.model.weight_bytes", "prefill_node.main",
                 "decode_node.main")  # fmt: skip

BLOCKED_IMPORTS = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Blocker())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


def test_every_arrow_points_left() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("kvrelay/types.py", "from kvrelay.kv.layout import KVLayout", "the arrow points only left"),
        ("kvrelay/kv/pool.py", "import kvrelay.rpc.channel", "the arrow points only left"),
        ("kvrelay/rpc/server.py", "from kvrelay.model import decoder", "the arrow points only left"),
        ("kvrelay/engine/loop.py", "def late():\n    from decode_node import engine", "the arrow points only left"),
        (
            "kvrelay/kv/layout.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvrelay.kv import remote",
            "the arrow points only left",
        ),
        ("kvrelay/kv/layout.py", "from . import cache", "the arrow points only left"),
        ("kvrelay/kv/layout.py", "from ..rpc.server import bind", "the arrow points only left"),
        ("decode_node/engine.py", "import importlib\nimportlib.import_module('kvrelay.cli')", "the arrow points"),
        ("decode_node/engine.py", "from prefill_node.engine import PrefillCore", "no role imports a role"),
        ("coordinator/flow.py", "from kvrelay.pb import types_pb2", "protobuf stops at the edge"),
        ("kvrelay/kv/frame.py", "from kvrelay.pb.decode_pb2 import HandoffBegin", "protobuf stops at the edge"),
        ("kvrelay/kv/pool.py", "import torch.nn", "torch is not for this room"),
        ("kvstore/store.py", "from torch import Tensor", "torch is not for this room"),
        ("coordinator/text.py", "from kvrelay.kv.cache import PagedKVCache", "this role runs without torch"),
        ("kvrelay/misc.py", "", "kvrelay.misc has no rank"),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, module: str, source: str, broken: str) -> None:
    for name in ("kvrelay/__init__.py", "kvrelay/kv/cache.py", "kvrelay/kv/remote.py", "kvrelay/model/decoder.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert violations(tmp_path) == []

    (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / module).write_text(source)

    assert [line for line in violations(tmp_path) if broken in line]


def test_allowed_imports_are_allowed(tmp_path: Path) -> None:
    sources = {
        "kvrelay/rpc/convert_types.py": "from kvrelay.pb import types_pb2\nfrom kvrelay.kv.layout import KVLayout",
        "kvrelay/kv/remote.py": "from kvrelay.rpc import channel\nfrom kvrelay.pb import kvstore_pb2",
        "kvrelay/model/decoder.py": "import torch\nfrom kvrelay.kv.cache import PagedKVCache",
        "coordinator/service.py": "from kvrelay.pb import inference_pb2_grpc\nfrom coordinator.flow import Flow",
        "decode_node/engine.py": "import torch, json\nfrom kvrelay.engine.loop import EngineLoop",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)

    assert violations(tmp_path) == []


def import_without_torch(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED_IMPORTS, *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_rooms_without_torch_import_where_torch_is_missing() -> None:
    cache = ("kvrelay.kv.cache",)
    names = [
        name
        for name in modules(ROOT)
        if name not in cache and any(name == room or name.startswith(f"{room}.") for room in WITHOUT_TORCH)
    ]

    result = import_without_torch(*names)

    assert result.returncode == 0, result.stderr


def test_the_import_blocker_blocks() -> None:
    result = import_without_torch("torch")

    assert result.returncode == 1
    assert "No module named 'torch'" in result.stderr


def test_a_node_on_a_cpu_starts_without_the_compiler_of_torch() -> None:
    """Its import takes a second and 70 MB of every node; only what runs on a GPU needs it."""
    program = "import sys, kvrelay.engine.load; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
