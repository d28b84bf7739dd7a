"""Configuration: one frozen dataclass per role; flags, environment, file and docs are made from its fields.

A field is declared once, by `option`. Where a value comes from, strongest first: flag (`--kv-bytes 1GiB`), environment
(`KVRELAY_DECODE_NODE_KV_BYTES`, then `KVRELAY_KV_BYTES`), file (`--config FILE` or `KVRELAY_CONFIG`; TOML, table
`[decode-node]`, then `[common]`), default. What is unknown or out of range is a ConfigError that says what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never, TypeVar

from kvrelay.errors import ConfigError
from kvrelay.option import Field, fields_of, flag_name
from kvrelay.role_config import NodeConfig
from kvrelay.setting_value import describe, parse_value, show_value
from kvrelay.types import Role

T = TypeVar("T")

_PURPOSES = {
    Role.COORDINATOR.value: "The front door: takes requests, chooses nodes for them, streams the answers.",
    Role.PREFILL_NODE.value: "Computes the KV cache of prompts and streams it to decode nodes.",
    Role.DECODE_NODE.value: "Takes the KV cache of prompts and generates the answers.",
    Role.KVSTORE.value: "Keeps KV blocks for reuse, in memory over LMDB.",
}


def load(cls: type[T], role: str, argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """The configuration of `role` (a Role's value). Raises ConfigError; exits after printing for --help."""
    fields = fields_of(cls)
    flags = vars(parser(cls, role).parse_args(argv))
    file_path = flags.pop("config", None) or environ.get("KVRELAY_CONFIG")
    values: dict[str, Any] = {}
    if file_path:
        values |= _from_file(fields, role, Path(file_path))
    values |= _from_environ(fields, role, environ)
    values |= {name: parse_value(fields[name], text, flag_name(name)) for name, text in flags.items()}
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise ConfigError(f"{flag_name(name)} is missing: {field.option.help}")
    return cls(**values)


def parser(cls: type[Any], role: str) -> argparse.ArgumentParser:
    """Takes every field as a flag; values stay text, and a flag not given is not in the result."""
    result = _Parser(
        prog=f"kvrelay {role}",
        description=_PURPOSES[role],
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    result.add_argument("--config", metavar="FILE", help="TOML file with tables [common] and one per role")
    for name, field in fields_of(cls).items():
        result.add_argument(flag_name(name), **_argument(field))
    return result


def markdown_table(cls: type[Any], role: str | None = None) -> str:
    """Documentation of every field: flag, environment variable, default, meaning."""
    prefix = "KVRELAY_" if role is None else _role_prefix(role)
    lines = ["| flag | environment | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields_of(cls).items():
        default = show_value(field, field.default) if field.default is not dataclasses.MISSING else ""
        shown = "required" if field.default is dataclasses.MISSING else f"`{default}`" if default else "none"
        meaning = describe(field).replace("|", "\\|")
        lines.append(f"| `{flag_name(name)}` | `{prefix}{name.upper()}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise ConfigError(f"{message}; `{self.prog} --help` lists what is allowed")


def _argument(field: Field) -> dict[str, Any]:
    help_text = describe(field).replace("%", "%%")
    if field.default is dataclasses.MISSING:
        help_text += " (required)"
    elif show_value(field, field.default):
        help_text += f" (default: {show_value(field, field.default)})"
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    names = {int: "N", float: "X", Path: "PATH"}
    metavar = "{" + ",".join(field.option.choices) + "}" if field.option.choices else names.get(field.type, "TEXT")
    by_unit = {"bytes": "SIZE", "host:port": "HOST:PORT", "store": "HOST:PORT", "directory": "DIR", "file": "FILE"}
    metavar = by_unit.get(field.option.unit, metavar)
    metavar += ",..." if field.takes_many else ""
    return {"metavar": metavar, "help": help_text}


def _role_prefix(role: str) -> str:
    return f"KVRELAY_{role.upper().replace('-', '_')}_"


def _from_environ(fields: Mapping[str, Field], role: str, environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = _role_prefix(role)
    own = {key: key.removeprefix(prefix).lower() for key in environ if key.startswith(prefix)}
    for key, name in own.items():
        if name not in fields:
            raise ConfigError(f"{key} is no setting of {role}; {_suggest(name, list(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        for key in (prefix + name.upper(), "KVRELAY_" + name.upper()):
            if key in environ:
                values[name] = parse_value(field, environ[key], key)
                break
    return values


def _from_file(fields: Mapping[str, Field], role: str, path: Path) -> dict[str, Any]:
    tables = _read_tables(path)
    shared = fields_of(NodeConfig)
    values: dict[str, Any] = {}
    for table in ("common", role):
        known = fields if table == role else {**shared, **fields}
        for key, value in tables.get(table, {}).items():
            if key not in known:
                raise ConfigError(f"{path}: [{table}] has an unknown key {key}; {_suggest(key, list(known))}")
            if key in fields:
                values[key] = parse_value(fields[key], value, f"{path}: [{table}] {key}")
    return values


def _read_tables(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    allowed = ["common", *(role.value for role in Role)]
    for name, table in tables.items():
        if name not in allowed:
            raise ConfigError(f"{path} has an unknown table or key {name}; {_suggest(name, allowed)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} is no table; write [{name}] and its keys below")
    return tables


def _suggest(name: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]}?" if close else f"allowed are {', '.join(sorted(allowed))}"
