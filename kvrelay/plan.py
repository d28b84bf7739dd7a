"""`kvrelay plan`: how many requests a node's memory has KV for, before there is a node. No model is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvrelay.byte_size import parse_size, show_size
from kvrelay.capacity import Capacity
from kvrelay.client_command import size, write
from kvrelay.errors import ConfigError, ModelFileError
from kvrelay.kv.layout import ITEM_BYTES
from kvrelay.model.kv_shape import KVShape, read_kv_shape
from kvrelay.model.weight_bytes import WeightBytes, read_weight_bytes

_DESCRIPTION = """\
Works out how many requests a node's memory has KV for, from the model's own config, without loading it. A node keeps
weights and KV in one dtype. Sizes are bytes, or such as 80GiB, or 80GB (decimal)."""

_HEADER = ("KV DTYPE", "WEIGHTS", "LEFT FOR KV", "BYTES A TOKEN", "BLOCKS", "A REQUEST", "AT A TIME")


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises ConfigError or ModelFileError, saying what to do, when there can be none."""
    options = parser().parse_args(argv)
    shape = read_kv_shape(options.model)
    weights = _weights(options)
    plans = _plans(options, shape, weights)
    if options.json:
        write(json.dumps(describe(options.model, shape, plans)) + "\n")
    else:
        write(report(options.model, shape, weights, plans) + "\n")
    return 0


def _weights(options: argparse.Namespace) -> WeightBytes:
    if isinstance(options.weights, int):
        return WeightBytes(num_floats=0, packed_bytes=options.weights)
    try:
        weights = read_weight_bytes(options.model)
    except ModelFileError as error:
        raise ModelFileError(f"{error.message}; without its weights, give their size by --weights") from error
    return weights.unpacked() if options.weights == "dtype" else weights


def _plans(options: argparse.Namespace, shape: KVShape, weights: WeightBytes) -> dict[str, Capacity]:
    """By the names of the dtypes that share it."""
    request_tokens = _request_tokens(options, shape)
    names: dict[int, str] = {}
    for name, item_bytes in ITEM_BYTES.items():
        names[item_bytes] = f"{names[item_bytes]}, {name}" if item_bytes in names else name
    plans = {
        name: Capacity(
            memory_bytes=options.memory,
            utilization=options.utilization,
            weight_bytes=weights.in_dtype(item_bytes),
            token_bytes=shape.token_values * item_bytes,
            block_tokens=options.block_tokens,
            request_tokens=request_tokens,
        )
        for item_bytes, name in names.items()
    }
    least = min(plans.values(), key=lambda plan: plan.weight_bytes)
    if not least.kv_bytes:
        raise ConfigError(
            f"the weights take {size(least.weight_bytes)}, and {float(options.utilization):g} of --memory "
            f"{show_size(options.memory)} is {size(least.usable_bytes)}: none is left for KV; give more memory, or a "
            "smaller or quantised model"
        )
    return plans


def _request_tokens(options: argparse.Namespace, shape: KVShape) -> int:
    most = shape.max_model_len
    tokens: int = options.p95_len or most
    if not tokens:
        raise ConfigError("the model's config does not say how long a request may be; give --p95-len")
    if most and tokens > most:
        raise ConfigError(
            f"--p95-len is {tokens}, and the model takes {most} tokens, prompt and answer together; give {most} or less"
        )
    return tokens


def describe(model: Path, shape: KVShape, plans: dict[str, Capacity]) -> dict[str, Any]:
    """The object of --json."""
    any_plan = next(iter(plans.values()))
    return {
        "model": str(model),
        "architecture": shape.architecture,
        "unserved": shape.unserved or None,
        "overcounted": shape.overcounted or None,
        "max_model_len": shape.max_model_len or None,
        "memory_bytes": any_plan.memory_bytes,
        "utilization": float(any_plan.utilization),
        "usable_bytes": any_plan.usable_bytes,
        "block_tokens": any_plan.block_tokens,
        "request_tokens": any_plan.request_tokens,
        "plans": [
            {
                "dtypes": names.split(", "),
                "weight_bytes": plan.weight_bytes,
                "kv_bytes": plan.kv_bytes,
                "token_bytes": plan.token_bytes,
                "block_bytes": plan.block_bytes,
                "num_blocks": plan.num_blocks,
                "request_blocks": plan.request_blocks,
                "request_bytes": plan.request_bytes,
                "num_requests": plan.num_requests,
            }
            for names, plan in plans.items()
        ],
    }


def report(model: Path, shape: KVShape, weights: WeightBytes, plans: dict[str, Capacity]) -> str:
    any_plan = next(iter(plans.values()))
    longest = f", up to {shape.max_model_len} tokens" if shape.max_model_len else ""
    rows = [_HEADER, *(_cells(names, plan) for names, plan in plans.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [
        f"{model.name or model}: {shape.architecture}{longest}; "
        f"KV of {shape.formula} = {shape.token_values} values a token",
        f"memory {size(any_plan.memory_bytes)} x {float(any_plan.utilization):g} = {size(any_plan.usable_bytes)}; "
        f"blocks of {any_plan.block_tokens} tokens; requests of {any_plan.request_tokens} tokens, "
        f"{any_plan.request_blocks} blocks each",
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
    ]
    notes = _notes(shape, weights, plans)
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _cells(names: str, plan: Capacity) -> tuple[str, ...]:
    return (
        *(names, size(plan.weight_bytes), size(plan.kv_bytes), str(plan.token_bytes), str(plan.num_blocks)),
        *(size(plan.request_bytes), str(plan.num_requests)),
    )


def _notes(shape: KVShape, weights: WeightBytes, plans: dict[str, Capacity]) -> list[str]:
    notes = []
    if shape.unserved:
        notes.append(f"kvrelay does not serve this model: {shape.unserved}")
    if shape.overcounted:
        notes.append(f"an engine for this model may keep less: {shape.overcounted}")
    if weights.num_packed:
        notes.append("quantised weights are counted as the file holds them; where nodes turn them into their dtype, as")
        notes.append("they do on a GPU, give --weights dtype")
    for names, plan in plans.items():
        if not plan.num_requests:
            why = "the weights fill the memory" if not plan.kv_bytes else "one request takes more than is left for KV"
            notes.append(f"{names}: {why}; give more memory or a lower --p95-len")
    return notes


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay plan", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--model", type=_path, required=True, metavar="PATH", help="a GGUF file or a Hugging Face directory")
    add("--memory", type=_some_bytes, required=True, metavar="SIZE", help="memory of the node's device, such as 80GiB")
    share = "share of it for weights and KV, the rest being for activations and the runtime; default: 0.9"
    add("--utilization", type=_share, default=Fraction("0.9"), metavar="X", help=share)
    length = "tokens of a long request, prompt and answer together; default: the longest that the model takes"
    add("--p95-len", type=_tokens, metavar="N", help=length)
    add("--block-tokens", type=_tokens, default=16, metavar="N", help="token positions of a block; default: 16")
    weights = (
        "what the weights take: file, quantised ones as the file holds them, dtype, all turned into the node's dtype, "
        "both read from the model's files; or a size; default: file"
    )
    add("--weights", type=_weights_choice, default="file", metavar="{file,dtype,SIZE}", help=weights)
    add("--json", action="store_true", help="print one JSON object instead")
    return parser


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _some_bytes(text: str) -> int:
    try:
        num_bytes = parse_size(text)
    except ValueError:
        num_bytes = 0
    if not num_bytes:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed is a size over 0, such as 80GiB, 80GB or 85899345920")
    return num_bytes


def _weights_choice(text: str) -> int | str:
    return text if text in ("file", "dtype") else _some_bytes(text)


def _share(text: str) -> Fraction:
    try:
        share = Fraction(text)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed is a share over 0, at most 1, such as 0.9")
    return share


def _tokens(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed is a whole number, at least 1")
    return int(text)
