"""What a run says: a line every few seconds, a table at the end, and of a failure all that it takes to run it again."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.checks import read, warnings_of
from tests.chaos.cluster import ChaosCluster
from tests.chaos.expected import Expected
from tests.chaos.faults import FaultRecord, Saboteur
from tests.chaos.load import Load, Outcome, Try
from tests.chaos.memory import MemoryWatch
from tests.chaos.plan import Fault, Kind
from tests.chaos.stalls import StallWatch

NUM_SHOWN = 5  # violations in full
AROUND_S = 15.0  # of the plan, on both sides of a violation
LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class Violation:
    """`at` is of time.monotonic."""

    what: str
    at: float
    attempt: Try | None = None


def what_comes(seconds: float) -> str:
    """How long a run takes in all, and what the words of its lines mean."""
    return (
        f"{seconds:g} s of load and faults, and one to three minutes before and after: to start, to compute the "
        f"answers, to come to rest and to stop; in all {seconds / 60 + 1:.0f} to {seconds / 60 + 3:.0f} minutes\n"
        '"failed honestly": the request\'s own coordinator was struck and the client was told so; it asks the other one'
    )


def progress(started: float, load: Load, saboteur: Saboteur, num_violations: int) -> str:
    counts = Counter(one.outcome for one in load.tries)
    now = ", ".join(f"{fault.kind.value} {fault.victim.name}" for fault in saboteur.active) or "no fault"
    return (
        f"{time.monotonic() - started:6.0f} s  {counts[Outcome.ANSWERED]} answered, {counts[Outcome.LEFT]} left, "
        f"{counts[Outcome.FAILED]} failed honestly, {counts[Outcome.WRONG]} WRONG, {load.num_open} open; "
        f"{len(saboteur.records)} faults ({now}); {num_violations} violations"
    )


def summary(
    cluster: ChaosCluster, load: Load, records: Sequence[FaultRecord], memory: MemoryWatch, stalls: StallWatch
) -> str:
    lines = ["", "requests", *_requests(load.tries), "", "faults", *_faults(records)]
    lines += ["", "time without a token, of requests whose own coordinator was well", *_silences(load.tries, records)]
    lines += ["", f"stalls of the machine: {len(stalls.stalls)}, worst {stalls.worst_s:.1f} s"]
    return "\n".join([*lines, "", "processes at the end", *_processes(cluster, memory)])


def explain(
    seed: int,
    command: str,
    violation: Violation,
    started: float,
    records: Sequence[FaultRecord],
    expected: Sequence[Expected],
) -> str:
    """Everything about one violation but the logs."""
    at_s = violation.at - started
    lines = [f"VIOLATION at {at_s:.1f} s (seed {seed}; again: {command})", violation.what]
    if violation.attempt is not None:
        lines += _request(violation.attempt, expected, started)
    lines.append("faults around it:")
    for record in records:
        start, end = record.began_at - started, (record.recovered_at or time.monotonic()) - started
        if start - AROUND_S <= at_s <= end + AROUND_S:
            lines.append(f"  {record.fault}; began {start:.1f} s, over {end:.1f} s")
    return "\n".join(lines)


def logs(cluster: ChaosCluster) -> str:
    """The end of each."""
    parts = []
    for victim, process in cluster.processes.items():
        end = read(process.log_path).splitlines()[-LOG_LINES:]
        parts.append("\n".join([f"--- the end of {victim.name}'s log, {process.log_path}", *end]))
    return "\n".join(parts)


def plan_text(faults: Sequence[Fault]) -> str:
    return "\n".join(f"  {fault}" for fault in faults)


def _request(one: Try, expected: Sequence[Expected], started: float) -> list[str]:
    wanted = expected[one.ask.shape]
    ended = (one.ended_at or time.monotonic()) - started
    lines = [
        f"request: {one.ask} id {one.request_id or '(not accepted)'}, sent to coordinator {one.coordinator} at "
        f"{one.started_at - started:.2f} s, over at {ended:.2f} s",
        f"  {wanted.shape}",
    ]
    for index, (want, got) in enumerate(zip(wanted.choices, one.choices, strict=True)):
        lines.append(f"  expected {index}: {len(want.token_ids)} tokens {list(want.token_ids)} ({want.reason.value})")
        lines.append(f"  got {index}:      {len(got.tokens)} tokens {[token.token_id for token in got.tokens]}")
    return [*lines, f"  finished: {one.finished}", f"  error: {one.error!r}"]


def _requests(tries: Sequence[Try]) -> list[str]:
    counts = Counter(one.outcome for one in tries)
    lines = [f"  {outcome.value:16} {counts[outcome]:7}" for outcome in Outcome]
    retries = Counter(one.finished.retries for one in tries if one.finished is not None)
    tokens = sum(len(choice.tokens) for one in tries for choice in one.choices)
    lines.append(f"  {'tokens':16} {tokens:7}")
    lines.append(f"  answered after a retry: {', '.join(f'{retries[n]} after {n}' for n in sorted(retries) if n) or 0}")
    errors = Counter(type(one.error).__name__ for one in tries if one.outcome is Outcome.FAILED)
    return [*lines, f"  honest failures: {', '.join(f'{n} {name}' for name, n in errors.items()) or 'none'}"]


def _faults(records: Sequence[FaultRecord]) -> list[str]:
    roles = list(dict.fromkeys(record.fault.victim.role for record in records))
    counts = Counter((record.fault.kind, record.fault.victim.role) for record in records)
    lines = ["  " + " " * 10 + "".join(f"{role.value:>14}" for role in roles)]
    for kind in Kind:
        lines.append(f"  {kind.value:10}" + "".join(f"{counts[kind, role]:14}" for role in roles))
    waits = [record.recovered_at - record.healed_at for record in records if record.recovered_at and record.healed_at]
    return [*lines, f"  until the victim served again: {_spread(waits)}"]


def _silences(tries: Sequence[Try], records: Sequence[FaultRecord]) -> list[str]:
    now = time.monotonic()
    during: list[float] = []
    calm: list[float] = []
    first: list[float] = []
    for one in tries:
        silences = one.silences(now)
        if not silences or one.outcome in (Outcome.FAILED, Outcome.STALLED):
            continue
        longest = max(end - start for start, end in silences)
        touched = any(record.overlaps(one.started_at, one.ended_at or now) for record in records)
        (during if touched else calm).append(longest)
        if touched and one.token_times:
            first.append(one.token_times[0] - one.started_at)
    return [
        f"  longest of each request during a fault: {_spread(during)}",
        f"  the same with no fault:                 {_spread(calm)}",
        f"  first token during a fault:             {_spread(first)}",
    ]


def _processes(cluster: ChaosCluster, memory: MemoryWatch) -> list[str]:
    lines = [f"  {'':16}{'warm MiB':>10}{'end MiB':>10}{'peak MiB':>10}{'log warnings':>14}"]
    for victim, process in cluster.processes.items():
        assert process.process is not None
        growth = memory.growth(victim, process.process.pid)
        warm = "-" if growth.warm_bytes is None else f"{growth.warm_bytes / 2**20:.0f}"
        sizes = f"{warm:>10}{growth.end_bytes / 2**20:10.0f}{memory.peak(victim) / 2**20:10.0f}"
        lines.append(f"  {victim.name:16}{sizes}{warnings_of(process.log_path):14}")
    return lines


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "none"
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, worst {max(values):.2f} s, of {len(values)}"
