"""Weights of a Hugging Face directory: config.json and safetensors, in one file or sharded under an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.errors import ModelFileError
from kvrelay.model.config import from_hf
from kvrelay.model.hf_files import CONFIG_NAME, GENERATION_CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME, read_json


class HFWeights:
    """Raises ModelFileError if a file is missing, unreadable or of an unserved kind."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        generation = directory / GENERATION_CONFIG_NAME
        self.config = from_hf(
            read_json(directory / CONFIG_NAME), read_json(generation) if generation.is_file() else None
        )
        self._file_of = self._locate()
        self._open_files: dict[str, Any] = {}

    def tensor(self, name: str) -> Tensor:
        if name not in self._file_of:
            raise ModelFileError(f"{self._directory} has no tensor {name}")
        file_name = self._file_of[name]
        try:
            return self._open(file_name).get_tensor(name).to(torch.float32)  # type: ignore[no-any-return]
        except SafetensorError as error:
            raise ModelFileError(f"cannot read tensor {name} from {self._directory / file_name}: {error}") from error

    def quantized(self, name: str) -> None:
        """Safetensors of a Llama hold no quantised matrix that is served."""
        return

    def rope_divisors(self) -> Tensor | None:
        return None

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self._directory / INDEX_NAME
        if index.is_file():
            return dict(read_json(index).get("weight_map", {}))
        return dict.fromkeys(self._open_file(WEIGHTS_NAME).keys(), WEIGHTS_NAME)

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            self._open_files[file_name] = self._open_file(file_name)
        return self._open_files[file_name]

    def _open_file(self, file_name: str) -> Any:
        path = self._directory / file_name
        if not path.is_file():
            raise ModelFileError(f"there is no model file {path}; weights must be safetensors")
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path} is not a whole safetensors file (truncated download?): {error}") from error
