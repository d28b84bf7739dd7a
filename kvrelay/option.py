"""A setting, as it is declared: a field of a role's dataclass, made by `option`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Field:
    """`type` is that of what is given: a field may be None where nothing is."""

    name: str
    type: type[Any]
    default: Any
    option: Option

    @property
    def takes_many(self) -> bool:
        return typing.get_origin(self.type) is tuple


def fields_of(cls: type[Any]) -> dict[str, Field]:
    """What can be set of a dataclass, by name."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: Field(field.name, _without_none(hints[field.name]), field.default, field.metadata["option"])
        for field in dataclasses.fields(cls)
        if "option" in field.metadata
    }


def _without_none(hint: Any) -> Any:
    """The type of what is given, of a field that is None where nothing is."""
    given = [one for one in typing.get_args(hint) if one is not NoneType] if isinstance(hint, UnionType) else [hint]
    return given[0]


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
