"""`kvrelay explain`: why a request waited, where it went and what it cost, from the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvrelay.client import AsyncClient
from kvrelay.client_answer import cached_by_tier
from kvrelay.client_command import make_parser, run, size, write
from kvrelay.errors import NotFoundError
from kvrelay.explanation import Explanation, LifeStep


def main(argv: Sequence[str]) -> int:
    """Prints one request's life; 1 with one line on stderr when no coordinator that is asked knows of it."""
    options = parser().parse_args(argv)
    return run("explain", options.address, lambda: _explain(options))


async def _explain(options: argparse.Namespace) -> None:
    async with AsyncClient(options.address) as client:
        try:
            explanation = await client.explain(options.request_id)
        except NotFoundError as error:
            raise NotFoundError(f"{error.message} at {options.address}; another coordinator may have it") from error
    write(json.dumps(describe(explanation), ensure_ascii=False) + "\n" if options.json else pretty(explanation) + "\n")


def describe(explanation: Explanation) -> dict[str, Any]:
    """The object of --json. Times in seconds."""
    return asdict(explanation)


def pretty(explanation: Explanation) -> str:
    """For people."""
    whose = f"tenant {explanation.tenant}, model {explanation.model}"
    lines = [
        f"request {explanation.request_id}: {explanation.state}; {whose}",
        *([f"  error    {explanation.error.code}: {explanation.error.message}"] if explanation.error else []),
        f"  time     {_times(explanation)}",
        f"  tokens   {_tokens(explanation)}",
        f"  nodes    {_nodes(explanation)}",
    ]
    labels = ("choice", *[""] * len(explanation.considered))
    lines += [f"  {label:8} {one}" for label, one in zip(labels, explanation.considered, strict=False)]
    return "\n".join([*lines, "", *_table(explanation.steps)])


def _times(explanation: Explanation) -> str:
    timing, forecast = explanation.timing, explanation.forecast
    parts = [f"waited {_seconds(timing.queue_s)}"]
    if forecast.actual_ttft_s or forecast.predicted_ttft_s:
        parts.append(f"first token {_compared(forecast.actual_ttft_s, forecast.predicted_ttft_s)}")
    if forecast.actual_itl_s or forecast.predicted_itl_s:
        parts.append(f"between tokens {_compared(forecast.actual_itl_s, forecast.predicted_itl_s)}")
    if timing.prefill_s:
        parts.append(f"prefill {_seconds(timing.prefill_s)}")
    if timing.handoff_s:
        parts.append(f"handoff {_seconds(timing.handoff_s)}")
    return ", ".join([*parts, f"in all {_seconds(timing.total_s)}"])


def _compared(actual_s: float, predicted_s: float) -> str:
    actual = _seconds(actual_s) if actual_s else "none"
    return f"{actual} (predicted {_seconds(predicted_s)})" if predicted_s else actual


def _tokens(explanation: Explanation) -> str:
    usage = explanation.usage
    return f"{usage.prompt_tokens} of the prompt ({cached_by_tier(usage.cached)}), {usage.completion_tokens} out"


def _nodes(explanation: Explanation) -> str:
    parts = []
    if explanation.prefill_node:
        parts.append(f"prefill {explanation.prefill_node}")
    if explanation.decode_node:
        tail = ", which computed the rest of the prompt" if explanation.computed_on_decode else ""
        parts.append(f"decode {explanation.decode_node} ({explanation.num_blocks} blocks){tail}")
    if explanation.handoff_bytes:
        parts.append(f"KV handed over {size(explanation.handoff_bytes)}")
    return ", ".join([*(parts or ["none yet"]), f"retries {explanation.retries}"])


def _table(steps: Sequence[LifeStep]) -> list[str]:
    rows = [("AFTER", "STEP", "DETAIL"), *((_seconds(step.at_s), step.edge, step.detail) for step in steps)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"  {after:>{widths[0]}}  {step:{widths[1]}}  {detail}".rstrip() for after, step, detail in rows]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "explain",
        "Tell why a request waited, where it went and what it cost: of one that runs, or ended within ten minutes.",
    )
    parser.add_argument(
        "request_id", metavar="ID", help="its id: what `kvrelay ask --request-id` or a client gave it, or --json told"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser
