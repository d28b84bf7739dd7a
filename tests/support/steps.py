"""Sequences laid into a paged cache by hand, and the step inputs a decoder takes: for tests without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrelay.kv.cache import PagedKVCache
from kvrelay.model.step import StepInput


@dataclass(slots=True)
class Row:
    """A sequence with the blocks it owns; `num_done` tokens have their KV in the cache."""

    token_ids: list[int]
    block_ids: list[int]
    num_done: int = 0


def step_input(rows: list[tuple[Row, int]], block_tokens: int) -> StepInput:
    """A step that computes the next n tokens of each (row, n), with logits wanted for every token of it."""
    tokens: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    for row, count in rows:
        tokens += row.token_ids[row.num_done : row.num_done + count]
        positions += range(row.num_done, row.num_done + count)
        query_starts.append(len(tokens))
    owners = [row for row, count in rows for _ in range(count)]
    slots = [
        row.block_ids[position // block_tokens] * block_tokens + position % block_tokens
        for row, position in zip(owners, positions, strict=True)
    ]
    context_lens = [row.num_done + count for row, count in rows]
    tables = [
        row.block_ids[: -(-context // block_tokens)] for (row, _), context in zip(rows, context_lens, strict=True)
    ]
    return StepInput(
        token_ids_T=torch.tensor(tokens),
        positions_T=torch.tensor(positions),
        slot_mapping_T=torch.tensor(slots),
        query_starts=tuple(query_starts),
        context_lens=tuple(context_lens),
        block_table_RB=torch.tensor(
            [table + [0] * (max(map(len, tables)) - len(table)) for table in tables], dtype=torch.int32
        ),
        logit_rows_N=torch.arange(len(tokens)),
    )


def run_step(decoder: Any, cache: PagedKVCache, rows: list[tuple[Row, int]]) -> list[Tensor]:
    """Runs one step and moves the rows on; returns each row's logits, [n, vocab]."""
    inp = step_input(rows, cache.layout.block_tokens)
    logits = decoder.step(inp, cache)
    for row, count in rows:
        row.num_done += count
    return list(logits.split([count for _, count in rows]))
