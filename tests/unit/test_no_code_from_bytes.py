"""Nothing that comes over a network, or out of a file or a store, is ever run or unpickled (lmdeploy#4804,
sglang#24618, ktransformers#2087, vllm#17192: remote code execution on internal ports)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arrows import modules

ROOT = Path(__file__).resolve().parents[2]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
NAMES = {"eval", "exec", "compile", "__import__"}
METHODS = {("torch", "load"), ("numpy", "load"), ("np", "load"), ("torch.jit", "load"), ("torch.package", "load")}


def unsafe(source: str) -> Iterator[str]:
    """What of a module would run or unpickle bytes, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {one.name}" for one in node.names if one.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{node.lineno}: {node.module}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield f"{node.lineno}: {node.func.id}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if (owner, node.func.attr) in METHODS or "allow_pickle" in {word.arg for word in node.keywords}:
                yield f"{node.lineno}: {owner}.{node.func.attr}"


def test_no_module_runs_or_unpickles_bytes() -> None:
    found = {name: list(unsafe(path.read_text("utf-8"))) for name, path in modules(ROOT).items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def late():\n    import marshal",
        "eval(text)",
        "torch.load(path, weights_only=True)",
        "np.fromfile(path, allow_pickle=True)",
    ],
)
def test_each_way_is_found(source: str) -> None:
    assert list(unsafe(source))


def test_what_only_sounds_like_it_is_not() -> None:
    assert list(unsafe("model.eval()\nre.compile(text)\njson.loads(text)")) == []
