"""What is asked for: requests with their times and sizes, from public traces (traces/README.md)."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.store.mooncake import BLOCK_TOKENS as TRACE_BLOCK_TOKENS
from kvrelay.types import BlockHash

_OWN = 1 << 40  # above all that traces name
_AZURE_DIRECTORY = Path(__file__).parent / "traces"
_MOONCAKE_DIRECTORY = Path(__file__).parents[1] / "store" / "traces"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as a client sends it. `num_output` is where its answer ends, which nobody knows beforehand;
    `hash_ids` name its prompt's blocks of TRACE_BLOCK_TOKENS, none where the trace says nothing of them."""

    at: float  # seconds
    num_prompt: int  # tokens
    num_output: int  # tokens, at least 1
    max_tokens: int
    tenant: str = "default"
    hash_ids: tuple[int, ...] = ()


@cache
def azure(name: str, max_tokens: int) -> tuple[Arrival, ...]:
    """All of a trace. The traces do not tell max_tokens: all ask for the same, and longer answers are cut there."""
    with lzma.open(_AZURE_DIRECTORY / f"azure_2023_{name}.csv.xz", "rt") as lines:
        next(lines)
        rows = [tuple(map(int, line.split(","))) for line in lines]
    return tuple(
        Arrival(ms / 1_000, prompt, max(1, min(output, max_tokens)), max_tokens) for ms, prompt, output in rows
    )


@cache
def mooncake(name: str, max_tokens: int, longest: int) -> tuple[Arrival, ...]:
    """Those of a trace whose prompts have at most `longest` tokens."""
    with lzma.open(_MOONCAKE_DIRECTORY / f"{name}_trace.jsonl.xz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return tuple(
        Arrival(
            at=row["timestamp"] / 1_000,
            num_prompt=row["input_length"],
            num_output=max(1, min(row["output_length"], max_tokens)),
            max_tokens=max_tokens,
            hash_ids=tuple(row["hash_ids"]),
        )
        for row in rows
        if 0 < row["input_length"] <= longest
    )


def cut(arrivals: Sequence[Arrival], number: int, num_slices: int) -> list[Arrival]:
    """One of so many slices with as many requests each, its times from 0."""
    size = len(arrivals) // num_slices
    part = arrivals[number * size : (number + 1) * size]
    return [replace(arrival, at=arrival.at - part[0].at) for arrival in part]


def paced(arrivals: Sequence[Arrival], per_s: float) -> list[Arrival]:
    """The same requests and bursts at so many a second on average."""
    span = arrivals[-1].at - arrivals[0].at
    stretch = (len(arrivals) - 1) / per_s / span
    return [replace(arrival, at=(arrival.at - arrivals[0].at) * stretch) for arrival in arrivals]


def block_hashes(arrival: Arrival, block_tokens: int, unique: int) -> list[BlockHash]:
    """Names of a request's full blocks to the end of its answer: equal names are equal contents after equal contents.

    `unique` is the first of a range of numbers that are this request's own. What a trace names blocks of
    TRACE_BLOCK_TOKENS by names the shorter ones in them too; the answer, and a prompt of which nothing is told, are
    nobody else's."""
    num_shared = arrival.num_prompt // block_tokens if arrival.hash_ids else 0
    parts = TRACE_BLOCK_TOKENS // block_tokens
    shared = [hash_id * parts + part for hash_id in arrival.hash_ids for part in range(parts)][:num_shared]
    num_own = (arrival.num_prompt + arrival.num_output) // block_tokens - len(shared)
    return [*map(_named, shared), *(_named(_OWN + number) for number in range(unique, unique + num_own))]


def _named(number: int) -> BlockHash:
    """Of 32 bytes, as hashes are; different in the upper 60 bits of the first word, by which coordinators know them."""
    return BlockHash((number << 4).to_bytes(32, "little"))
