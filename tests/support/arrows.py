"""Reads imports from source and says which break the rules of the house. Lazy and TYPE_CHECKING imports count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROLES = ("coordinator", "prefill_node", "decode_node", "kvstore")

# An arrow points to the same or a lower rank. The longest matching prefix gives a module's rank.
RANKS = {
    "kvrelay": 0,
    "kvrelay.types": 0,
    "kvrelay.sampling": 0,
    "kvrelay.structured": 0,
    "kvrelay.messages": 0,
    "kvrelay.inference": 0,
    "kvrelay.explanation": 0,
    "kvrelay.delivered": 0,
    "kvrelay.rounds": 0,
    "kvrelay.duration": 0,
    "kvrelay.errors": 0,
    "kvrelay.limits": 0,
    "kvrelay.rates": 0,
    "kvrelay.address": 0,
    "kvrelay.byte_size": 0,
    "kvrelay.config": 0,
    "kvrelay.option": 0,
    "kvrelay.role_config": 0,
    "kvrelay.setting_value": 0,
    "kvrelay.log": 0,
    "kvrelay.watched_file": 0,
    "kvrelay.metrics": 0,
    "kvrelay.pb": 1,
    "kvrelay.kv.layout": 2,
    "kvrelay.kv.hashing": 2,
    "kvrelay.kv.pool": 2,
    "kvrelay.kv.frame": 2,
    "kvrelay.kv": 2,
    "kvrelay.cluster": 2,
    "kvrelay.gguf_metadata": 2,
    "kvrelay.capacity": 2,
    "kvrelay.chat_template": 2,
    "kvrelay.tool_prompt": 2,
    "kvrelay.tokenizer": 2,
    "kvrelay.tokenizer_files": 2,
    "kvrelay.detokenizer": 2,
    "kvrelay.matcher": 2,
    "kvrelay.grammars": 2,
    "kvrelay.matchers": 2,
    "kvrelay.rpc": 3,
    "kvrelay.kv.remote": 3,
    "kvrelay.kv.remote_admin": 3,
    "kvrelay.kv.offload": 3,
    "kvrelay.kv.redis_store": 3,
    "kvrelay.kv.open_store": 3,
    "kvrelay.client": 3,
    "kvrelay.failover": 3,
    "kvrelay.kv.cache": 4,
    "kvrelay.model": 4,
    "kvrelay.engine": 5,
    **dict.fromkeys(ROLES, 6),
    # Commands: nothing imports them but each other.
    "kvrelay.__main__": 7,
    "kvrelay.answer_printer": 7,
    "kvrelay.ask": 7,
    "kvrelay.structured_arguments": 7,
    "kvrelay.cancel": 7,
    "kvrelay.chat": 7,
    "kvrelay.explain": 7,
    "kvrelay.keys": 7,
    "kvrelay.locks": 7,
    "kvrelay.certs": 7,
    "kvrelay.certificates": 7,
    "kvrelay.status": 7,
    "kvrelay.client_answer": 7,
    "kvrelay.client_command": 7,
    "kvrelay.cli": 7,
    "kvrelay.completion": 7,
    "kvrelay.config_table": 7,
    "kvrelay.demo_model": 7,
    "kvrelay.local_cluster": 7,
    "kvrelay.progress_bar": 7,
    "kvrelay.plan": 7,
    "kvrelay.planned_roles": 7,
    "kvrelay.role_process": 7,
    "kvrelay.store_chains": 7,
    "kvrelay.store_command": 7,
    "kvrelay.store_look": 7,
    "kvrelay.store_targets": 7,
    "kvrelay.store_warm": 7,
    "kvrelay.store_work": 7,
    "kvrelay.up": 7,
    "kvrelay.warm_prompts": 7,
    "kvrelay.weight": 7,
}
TORCH_RANKS = (4, 5)  # and the roles that compute
TORCH_ROLES = ("prefill_node", "decode_node")


def modules(root: Path) -> dict[str, Path]:
    """Source files of the house under `root`, by module name."""
    found = {}
    for top in ("kvrelay", *ROLES):
        for path in sorted((root / top).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def violations(root: Path) -> list[str]:
    """One line for each import that breaks a rule, and for each module without a rank."""
    names = modules(root)
    lines = [f"{name} has no rank in tests/support/arrows.py" for name in names if _rank(name) is None]
    for name, path in names.items():
        for line, imported in _imports(name, path, frozenset(names)):
            lines += [f"{name}:{line} imports {imported}: {why}" for why in _broken_rules(name, imported)]
    return lines


def _broken_rules(name: str, imported: str) -> Iterator[str]:
    top, imported_top = name.split(".")[0], imported.split(".")[0]
    if imported_top == "torch" and not _may_use_torch(name):
        yield "torch is not for this room"
    if imported_top not in ("kvrelay", *ROLES):
        return
    if imported_top in ROLES and top in ROLES and imported_top != top:
        yield "no role imports a role"
    rank, imported_rank = _rank(name), _rank(imported)
    if rank is not None and imported_rank is not None and imported_rank > rank:
        yield "the arrow points only left"
    if "_pb2" in imported and not _may_use_pb(name):
        yield "protobuf stops at the edge"
    if top in ROLES and top not in TORCH_ROLES and imported_rank in TORCH_RANKS:
        yield "this role runs without torch"


def _rank(name: str) -> int | None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in RANKS and (prefix != "kvrelay" or len(parts) == 1):
            return RANKS[prefix]
    return None


def _may_use_torch(name: str) -> bool:
    return _rank(name) in TORCH_RANKS or name.split(".")[0] in TORCH_ROLES


def _may_use_pb(name: str) -> bool:
    services = tuple(f"{role}.service" for role in ROLES)
    return name.startswith(("kvrelay.pb.", "kvrelay.rpc.")) or name in (
        "kvrelay.kv.remote",
        "kvrelay.kv.remote_admin",
        *services,
    )


def _imports(name: str, path: Path, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path.name)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            yield from ((node.lineno, _target(base, alias.name, known)) for alias in node.names)
        elif isinstance(node, ast.Call) and (literal := _dynamic_import(node)):
            yield node.lineno, literal


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _target(base: str, name: str, known: frozenset[str]) -> str:
    """`from a import b` names the module a.b if there is one, and else a."""
    return f"{base}.{name}" if f"{base}.{name}" in known or name.endswith(("_pb2", "_pb2_grpc")) else base


def _dynamic_import(node: ast.Call) -> str | None:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    argument = node.args[0] if called in ("import_module", "__import__") and node.args else None
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else None
