"""The compiled decoder library: found, checked against this CPU, and its functions with their types.

It is built from cpp/decoder.cpp together with the package, once for each instruction set in VARIANTS. Where it is
missing, or the CPU has none of these, the plain torch decoder serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from ctypes import POINTER, c_float, c_int32, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DIRECTORY = Path(__file__).parent / "cpp"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]  # as /proc/cpuinfo spells them

    @property
    def file_name(self) -> str:
        return f"decoder_{self.name}.so"


# Best first. The second has no product of bfloat16 pairs: two multiplications of floats take its place.
VARIANTS = (
    Variant(
        "avx512_bf16",
        ("-march=x86-64-v4", "-mavx512bf16"),
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_bf16", "fma", "f16c"}),
    ),
    Variant("avx2", ("-march=x86-64-v3",), frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})),
)


class Shape(ctypes.Structure):
    """KvrelayShape of decoder.cpp."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int32) for name in ("intermediate_size", "vocab_size", "is_bfloat16", "num_threads")),
        ("max_positions", c_int32),
        ("rms_norm_eps", c_float),
    )


class Step(ctypes.Structure):
    """KvrelayStep of decoder.cpp. Pointers live as long as the call."""

    _fields_ = (
        *((name, c_int32) for name in ("num_tokens", "num_rows", "num_logits", "block_tokens", "table_width")),
        *((name, c_void_p) for name in ("token_ids", "slots", "query_starts", "context_lens", "block_table")),
        *((name, c_void_p) for name in ("logit_rows", "cache", "logits")),
    )


class Library:
    """One variant's functions. Calls release the interpreter lock."""

    def __init__(self, variant: Variant, path: Path) -> None:
        """Raises OSError if the file cannot be loaded or was built from other source than what lies beside it."""
        self.name = variant.name
        library = ctypes.CDLL(str(path))
        _check_source(library, path)
        self.panel_columns: int = library.kvrelay_panel_columns()
        self.multiplies_quantized = bool(library.kvrelay_multiplies_quantized())  # without expanding them first
        self.create = library.kvrelay_create
        self.create.restype, self.create.argtypes = c_void_p, (POINTER(Shape),)
        self.destroy = library.kvrelay_destroy
        self.destroy.restype, self.destroy.argtypes = None, (c_void_p,)
        self.set_matrix = library.kvrelay_set_matrix
        self.set_matrix.argtypes = (c_void_p, *(c_int32,) * 5, c_void_p)
        self.set_norm = library.kvrelay_set_norm
        self.set_norm.argtypes = (c_void_p, c_int32, c_int32, c_void_p)
        self.set_rotary = library.kvrelay_set_rotary
        self.set_rotary.argtypes = (c_void_p, c_void_p, c_void_p)
        self.likeliest = library.kvrelay_likeliest
        self.likeliest.restype, self.likeliest.argtypes = None, (c_void_p, c_int32, c_int32, c_void_p, c_void_p)
        self.step = library.kvrelay_step
        self.step.argtypes = (c_void_p, POINTER(Step))


@cache
def find_library() -> Library | None:
    """The best variant that is built and that this CPU runs, or None, with one log line that says why."""
    here = cpu_flags()
    runnable = [variant for variant in VARIANTS if variant.cpu_flags <= here]
    if not runnable:
        _log.info("no native decoder: this CPU has no AVX2; what runs in plain torch instead is slower")
        return None
    for variant in runnable:
        path = DIRECTORY / variant.file_name
        if not path.exists():
            continue
        try:
            return Library(variant, path)
        except OSError as error:
            _log.warning("no native decoder: %s; what runs in plain torch instead is several times slower", error)
            return None
    _log.warning(
        "no native decoder: it was not built, which needs a C++ compiler (g++ 11 or newer) when kvrelay is installed; "
        "what runs in plain torch instead is several times slower"
    )
    return None


def source_fingerprint() -> str:
    """Of the source beside this module: a library says of which it was built."""
    digest = hashlib.sha256()
    for path in sorted(DIRECTORY.glob("*.[hc]*")):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _check_source(library: ctypes.CDLL, path: Path) -> None:
    try:
        library.kvrelay_source.restype = ctypes.c_char_p
        built_from = library.kvrelay_source().decode()
    except AttributeError:
        built_from = ""
    if built_from != source_fingerprint():
        raise OSError(f"{path} was built from other source than what is installed; run `make native` or reinstall")


def cpu_flags() -> frozenset[str]:
    """What this CPU has, as /proc/cpuinfo spells it; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())
