"""Which models a coordinator serves, as it is written in its settings. Pure."""

from __future__ import annotations

import re
from pathlib import Path

from kvrelay.errors import ConfigError

MAX_NAME_CHARS = 128


def parse_models(text: str) -> dict[str, Path]:
    """Paths by the name that clients ask for, of `NAME=PATH` entries with semicolons or line breaks between. Raises
    ConfigError that says where."""
    paths: dict[str, Path] = {}
    for entry in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        name, equals, path = (part.strip() for part in entry.partition("="))
        if not equals or not path:
            raise ConfigError(
                f"models has {entry[:MAX_NAME_CHARS]!r}: a name, an equals sign and a path are needed, such as "
                "small=/models/small.gguf"
            )
        add_model(paths, name, Path(path).expanduser())
    return paths


def add_model(paths: dict[str, Path], name: str, path: Path) -> None:
    """Raises ConfigError for a name that is none, or is taken."""
    if not (1 <= len(name) <= MAX_NAME_CHARS and name.isprintable()):
        raise ConfigError(
            f"a model's name is {name[:MAX_NAME_CHARS]!r}; allowed are 1 to {MAX_NAME_CHARS} printable characters"
        )
    if name in paths:
        raise ConfigError(f"two models are named {name!r}; clients could not tell them apart")
    paths[name] = path
