"""The value of a setting: read from what was written, bounded, shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrelay.address import check_address, check_store
from kvrelay.byte_size import parse_size, show_size
from kvrelay.errors import ConfigError
from kvrelay.option import Field

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def describe(field: Field) -> str:
    """What it means, for people."""
    unit, choices = field.option.unit, field.option.choices
    text = field.option.help
    if unit == "s":
        text += ", in seconds"
    if choices:
        text += f": {', '.join(choices)}"
    return text


def show_value(field: Field, value: Any) -> str:
    """As it would be written."""
    if field.option.unit == "bytes":
        return show_size(value)
    if field.takes_many:
        return ",".join(value)
    if value is None:
        return ""
    return str(value).lower() if field.type is bool else str(value)


def parse_value(field: Field, value: Any, source: str) -> Any:
    """The field's value from text or a TOML value; `source` says in errors where it was written.
    Raises ConfigError."""
    try:
        parsed = _convert(field, value)
    except ValueError as error:
        raise ConfigError(f"{source} is {value!r}; allowed is {_allowed(field)}") from error
    low, high = field.option.minimum, field.option.maximum
    out_of_range = (low is not None and not parsed >= low) or (high is not None and not parsed <= high)
    if out_of_range or (field.option.choices and parsed not in field.option.choices):
        raise ConfigError(f"{source} is {value!r}; allowed is {_allowed(field)}")
    return parsed


def _convert(field: Field, value: Any) -> Any:
    if field.type is bool:
        return _convert_bool(value)
    if field.takes_many:
        return _convert_addresses(value, check_store if field.option.unit == "store" else check_address)
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
        check_address(value)
    return field.type(value).expanduser() if field.type is Path else value


def _convert_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(value)
    return text in _TRUE


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


def _allowed(field: Field) -> str:
    unit, low, high = field.option.unit, field.option.minimum, field.option.maximum
    if field.option.choices:
        return "one of " + ", ".join(field.option.choices)
    if field.takes_many:
        kind = "host:port or redis://host:port" if unit == "store" else "host:port"
        return f"{kind}, or several different ones with commas between, such as 127.0.0.1:7400,127.0.0.1:7401"
    if unit == "host:port":
        return "host:port, such as 127.0.0.1:7400"
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    kind = "a size such as 4096, 512MiB or 2GiB" if unit == "bytes" else kinds[field.type]
    if low is not None and high is not None:
        return f"{kind} from {low:g} to {high:g}"
    return f"{kind}, at least {low:g}" if low is not None else f"{kind}, at most {high:g}" if high is not None else kind
