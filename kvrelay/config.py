"""Configuration: one frozen dataclass per role; flags, environment, file and docs are made from its fields.

A field is declared once, by `option`. Where a value comes from, strongest first: flag (`--kv-bytes 1GiB`), environment
(`KVRELAY_DECODE_NODE_KV_BYTES`, then `KVRELAY_KV_BYTES`), file (`--config FILE` or `KVRELAY_CONFIG`; TOML, table
`[decode-node]`, then `[common]`), default. What is unknown or out of range is a ConfigError that says what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Never, TypeVar

from kvrelay.errors import ConfigError
from kvrelay.limits import MAX_WEIGHT, QueueMarks
from kvrelay.types import Role

T = TypeVar("T")

REDIS_SCHEME = "redis://"  # of a kvstore that is a Redis or Valkey server
_BINARY_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, **_BINARY_UNITS}
MAX_PORT = 65_535
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


JOIN_HELP = "coordinators to join, host:port with commas between; none: serve without a cluster"

_PURPOSES = {
    Role.COORDINATOR.value: "The front door: takes requests, chooses nodes for them, streams the answers.",
    Role.PREFILL_NODE.value: "Computes the KV cache of prompts and streams it to decode nodes.",
    Role.DECODE_NODE.value: "Takes the KV cache of prompts and generates the answers.",
    Role.KVSTORE.value: "Keeps KV blocks for reuse, in memory over LMDB.",
}


@dataclass(frozen=True, slots=True)
class Option:
    """What a field's metadata holds under "option"."""

    help: str
    unit: str
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field that can be configured; without a default it must be given.

    `unit` is shown beside the help; "bytes" makes an int field take sizes such as 512MiB, "host:port" makes a str
    field take nothing but an address (or "") and a tuple[str, ...] field any number of different ones, written with
    commas between (in the file also as an array), "store" makes it take redis://host:port too, and "directory" and
    "file" say what a str field names.
    """
    metadata = {"option": Option(help, unit, tuple(choices), minimum, maximum)}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """What every role has."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(0, "port of the gRPC services; 0 takes any free one", minimum=0, maximum=MAX_PORT)
    advertise: str = option("", "host or host:port that others are told; default: what it listens on")
    metrics_port: int = option(
        -1, "port of the Prometheus metrics over HTTP; 0 takes any free one, -1 is off", minimum=-1, maximum=MAX_PORT
    )
    log_level: str = option("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "one line of text or one JSON object a message", choices=("text", "json"))
    peer_ca: str = option(
        "",
        "CA that signs the certificates of all roles: with peer_cert and peer_key roles speak mutual TLS; none: in the "
        "clear",
        unit="file",
    )
    peer_cert: str = option("", "this role's certificate, for the host that others reach it by", unit="file")
    peer_key: str = option("", "the key of peer_cert", unit="file")
    grace_s: float = option(30.0, "time running requests get to finish after SIGTERM", unit="s", minimum=0)

    def check(self) -> None:
        """Raises ConfigError where fields contradict each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig(RoleConfig):
    """What prefill and decode nodes have in common."""

    model: Path = option(help="a GGUF file or a Hugging Face directory")
    model_name: str = option(
        "",
        "name of what this node serves; where its coordinators serve several models, which one; default: the file's",
    )
    dtype: str = option("bfloat16", "type of weights, KV and computation", choices=("bfloat16", "float16", "float32"))
    weights: str = option(
        "file",
        "of a GGUF file: file computes with quantised ones as they are where that is possible (least memory, quick for "
        "small batches), dtype turns all into dtype when the model is loaded, both keeps both (quick throughout). In "
        "bfloat16 only dtype gives the same tokens whatever else runs: with file and both logits depend in their last "
        "bits on how many rows a step has",
        choices=("file", "dtype", "both"),
    )
    decoder: str = option(
        "auto",
        "native is the compiled decoder for CPUs, torch the plain one; auto takes the native one where it can serve",
        choices=("auto", "native", "torch"),
    )
    device: str = option("cpu", "where the model runs; auto prefers a GPU", choices=("cpu", "cuda", "auto"))
    threads: int = option(0, "threads of one computation; 0 takes every core", minimum=0)
    num_blocks: int = option(0, "KV blocks of the pool; 0 derives them from kv_bytes", minimum=0)
    kv_bytes: int = option(512 * 2**20, "memory of the KV pool", unit="bytes", minimum=1)
    block_tokens: int = option(16, "token positions of a block; the same on every node", minimum=1, maximum=1024)
    coordinator: tuple[str, ...] = option((), JOIN_HELP, unit="host:port")
    kvstore: tuple[str, ...] = option(
        (),
        "KV stores to share prefixes through, the same on every node; each has a share of the prompts. none: only this "
        "node's own",
        unit="store",
    )
    kvstore_replicas: int = option(1, "kvstores that keep each prompt's blocks, of those that are there", minimum=1)
    queue_low_s: float = option(
        0.03, "wait of newcomers for the step that runs, under which steps get longer again", unit="s", minimum=0.0
    )
    queue_high_s: float = option(
        0.1,
        "wait of newcomers for the step that runs, above which steps get shorter; 0: never",
        unit="s",
        minimum=0.0,
    )
    weight: float = option(
        1.0,
        "the node's part of the requests beside other nodes' weights, until `kvrelay weight` changes it; 0: it takes "
        "nothing new",
        minimum=0.0,
        maximum=MAX_WEIGHT,
    )
    watchdog_s: float = option(
        10.0, "longest step before the node calls itself stuck and gives its requests up", unit="s", minimum=0.1
    )

    @property
    def marks(self) -> QueueMarks | None:
        """None: no wait makes steps shorter."""
        return QueueMarks(self.queue_low_s, self.queue_high_s) if self.queue_high_s else None


def load(cls: type[T], role: str, argv: Sequence[str], environ: Mapping[str, str]) -> T:
    """The configuration of `role` (a Role's value). Raises ConfigError; exits after printing for --help."""
    fields = _fields(cls)
    flags = vars(parser(cls, role).parse_args(argv))
    file_path = flags.pop("config", None) or environ.get("KVRELAY_CONFIG")
    values: dict[str, Any] = {}
    if file_path:
        values |= _from_file(fields, role, Path(file_path))
    values |= _from_environ(fields, role, environ)
    values |= {name: _parse(fields[name], text, flag_name(name)) for name, text in flags.items()}
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
    for name, field in _fields(cls).items():
        result.add_argument(flag_name(name), **_argument(field))
    return result


def markdown_table(cls: type[Any], role: str | None = None) -> str:
    """Documentation of every field: flag, environment variable, default, meaning."""
    prefix = "KVRELAY_" if role is None else _role_prefix(role)
    lines = ["| flag | environment | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in _fields(cls).items():
        default = _show(field, field.default) if field.default is not dataclasses.MISSING else ""
        shown = "required" if field.default is dataclasses.MISSING else f"`{default}`" if default else "none"
        meaning = _describe(field).replace("|", "\\|")
        lines.append(f"| `{flag_name(name)}` | `{prefix}{name.upper()}` | {shown} | {meaning} |")
    return "\n".join(lines) + "\n"


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def parse_size(text: str) -> int:
    """Bytes of "4096", "512MiB", "1.5 GiB" or "80GB" (decimal, as vendors count); raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    factor = SIZE_UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(text)
    return int(float(match[1]) * factor)


def show_size(num_bytes: int) -> str:
    """The shortest exact spelling: 536870912 is "512MiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit.upper()]
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Never:
        raise ConfigError(f"{message}; `{self.prog} --help` lists what is allowed")


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: type[Any]
    default: Any
    option: Option


def _fields(cls: type[Any]) -> dict[str, _Field]:
    hints = typing.get_type_hints(cls)
    return {
        field.name: _Field(field.name, _without_none(hints[field.name]), field.default, field.metadata["option"])
        for field in dataclasses.fields(cls)
        if "option" in field.metadata
    }


def _without_none(hint: Any) -> Any:
    """The type of what is given, of a field that is None where nothing is."""
    given = [one for one in typing.get_args(hint) if one is not NoneType] if isinstance(hint, UnionType) else [hint]
    return given[0]


def _argument(field: _Field) -> dict[str, Any]:
    help_text = _describe(field).replace("%", "%%")
    if field.default is dataclasses.MISSING:
        help_text += " (required)"
    elif _show(field, field.default):
        help_text += f" (default: {_show(field, field.default)})"
    if field.type is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    names = {int: "N", float: "X", Path: "PATH"}
    metavar = "{" + ",".join(field.option.choices) + "}" if field.option.choices else names.get(field.type, "TEXT")
    by_unit = {"bytes": "SIZE", "host:port": "HOST:PORT", "store": "HOST:PORT", "directory": "DIR", "file": "FILE"}
    metavar = by_unit.get(field.option.unit, metavar)
    metavar += ",..." if _takes_many(field) else ""
    return {"metavar": metavar, "help": help_text}


def _describe(field: _Field) -> str:
    unit, choices = field.option.unit, field.option.choices
    text = field.option.help
    if unit == "s":
        text += ", in seconds"
    if choices:
        text += f": {', '.join(choices)}"
    return text


def _show(field: _Field, value: Any) -> str:
    if field.option.unit == "bytes":
        return show_size(value)
    if _takes_many(field):
        return ",".join(value)
    if value is None:
        return ""
    return str(value).lower() if field.type is bool else str(value)


def _role_prefix(role: str) -> str:
    return f"KVRELAY_{role.upper().replace('-', '_')}_"


def _from_environ(fields: Mapping[str, _Field], role: str, environ: Mapping[str, str]) -> dict[str, Any]:
    prefix = _role_prefix(role)
    own = {key: key.removeprefix(prefix).lower() for key in environ if key.startswith(prefix)}
    for key, name in own.items():
        if name not in fields:
            raise ConfigError(f"{key} is no setting of {role}; {_suggest(name, list(fields))}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        for key in (prefix + name.upper(), "KVRELAY_" + name.upper()):
            if key in environ:
                values[name] = _parse(field, environ[key], key)
                break
    return values


def _from_file(fields: Mapping[str, _Field], role: str, path: Path) -> dict[str, Any]:
    tables = _read_tables(path)
    shared = _fields(NodeConfig)
    values: dict[str, Any] = {}
    for table in ("common", role):
        known = fields if table == role else {**shared, **fields}
        for key, value in tables.get(table, {}).items():
            if key not in known:
                raise ConfigError(f"{path}: [{table}] has an unknown key {key}; {_suggest(key, list(known))}")
            if key in fields:
                values[key] = _parse(fields[key], value, f"{path}: [{table}] {key}")
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


def _parse(field: _Field, value: Any, source: str) -> Any:
    """The field's value from text or a TOML value; `source` says in errors where it was written."""
    try:
        parsed = _convert(field, value)
    except ValueError as error:
        raise ConfigError(f"{source} is {value!r}; allowed is {_allowed(field)}") from error
    low, high = field.option.minimum, field.option.maximum
    out_of_range = (low is not None and not parsed >= low) or (high is not None and not parsed <= high)
    if out_of_range or (field.option.choices and parsed not in field.option.choices):
        raise ConfigError(f"{source} is {value!r}; allowed is {_allowed(field)}")
    return parsed


def _convert(field: _Field, value: Any) -> Any:
    if field.type is bool:
        return _convert_bool(value)
    if _takes_many(field):
        return _convert_addresses(value, _check_store if field.option.unit == "store" else _check_address)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    if field.type is int:
        if isinstance(value, float):
            raise ValueError(value)
        return parse_size(str(value)) if field.option.unit == "bytes" else int(value)
    if field.type is float:
        number = float(value)
        if number - number != 0:  # infinite, or not a number
            raise ValueError(value)
        return number
    if not isinstance(value, str):
        raise ValueError(value)
    if field.option.unit == "host:port":
        _check_address(value)
    return field.type(value).expanduser() if field.type is Path else value


def _convert_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(value)
    return text in _TRUE


def _takes_many(field: _Field) -> bool:
    return typing.get_origin(field.type) is tuple


def _convert_addresses(value: Any, check: Callable[[str], None]) -> tuple[str, ...]:
    """Different ones: a node that joins one coordinator twice would push itself out of it."""
    if isinstance(value, str):
        value = value.split(",") if value else []
    if not isinstance(value, list) or not all(isinstance(one, str) and one.strip() for one in value):
        raise ValueError(value)
    addresses = tuple(one.strip() for one in value)
    for address in addresses:
        check(address)
    if len(set(addresses)) < len(addresses):
        raise ValueError(value)
    return addresses


def is_address(text: str) -> bool:
    """Whether it is one host:port."""
    host, _, port = text.rpartition(":")
    is_more = any(char in ",;/" or char.isspace() for char in host)  # a list, or a URL
    return bool(host) and not is_more and port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT


def _check_address(text: str) -> None:
    if text and not is_address(text):
        raise ValueError(text)


def _check_store(text: str) -> None:
    address = text.removeprefix(REDIS_SCHEME)
    if not address:
        raise ValueError(text)
    _check_address(address)


def _allowed(field: _Field) -> str:
    unit, low, high = field.option.unit, field.option.minimum, field.option.maximum
    if field.option.choices:
        return "one of " + ", ".join(field.option.choices)
    if _takes_many(field):
        kind = "host:port or redis://host:port" if unit == "store" else "host:port"
        return f"{kind}, or several different ones with commas between, such as 127.0.0.1:7400,127.0.0.1:7401"
    if unit == "host:port":
        return "host:port, such as 127.0.0.1:7400"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    kind = "a size such as 4096, 512MiB or 2GiB" if unit == "bytes" else kinds[field.type]
    if low is not None and high is not None:
        return f"{kind} from {low:g} to {high:g}"
    return f"{kind}, at least {low:g}" if low is not None else f"{kind}, at most {high:g}" if high is not None else kind
