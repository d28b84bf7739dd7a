"""The files of a Hugging Face directory, by name, and their JSON. No torch: the command line reads them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelFileError

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelFileError, naming the file, when it is missing or no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"there is no model file {path}") from None
    except OSError as error:
        raise ModelFileError(f"cannot read model file {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return value
