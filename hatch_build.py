"""Has the native decoder built with the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeDecoderHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sys.path.insert(0, str(Path(__file__).parent / "scripts"))
        from build_native import build_native

        try:
            built = build_native(self.app.display_warning)
        except subprocess.CalledProcessError as error:
            self.app.display_warning(f"the native decoder could not be compiled (g++ 11 or newer is needed): {error}")
            built = False
        if built:
            build_data["artifacts"].append("kvrelay/model/cpp/*.so")
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
