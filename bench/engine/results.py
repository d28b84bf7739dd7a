"""What the rounds gave, and the tables and the JSON made of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.engine.engines import KVRELAY
from bench.engine.launch import Report
from bench.engine.plan import BF16, CONTENTION, CONTEXT, FOUR_BIT, ONE_THREAD, TABLES, Run
from bench.engine.table import NOTHING, Row, markdown, number, percentile, ratios, speeds, spread

MIB = 2**20
_TITLES = {
    BF16: "16-bit weights",
    FOUR_BIT: "The file's own quantised weights",
    CONTEXT: "Decode at longer contexts",
    ONE_THREAD: "One thread",
    CONTENTION: "Decode on one core, what happens on the other",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One worker's report. `busy_tokens_per_s` is what the prefill process beside it did, if there was one."""

    run: Run
    round: int
    report: Report
    cpus_busy_before: float  # share of the CPUs' time that others took just before
    busy_tokens_per_s: float | None = None


@dataclass(slots=True)
class Results:
    """Grows from run to run; everything else is read from it."""

    about: dict[str, Any]  # machine, options: goes into the JSON as it is
    outcomes: list[Outcome] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)  # a row or an engine, and why

    def as_json(self) -> dict[str, Any]:
        return {**self.about, "not_run": self.not_run, "outcomes": [_fields(outcome) for outcome in self.outcomes]}

    def as_markdown(self) -> str:
        sections = []
        for table in TABLES:
            outcomes = [outcome for outcome in self.outcomes if outcome.run.table == table]
            if outcomes:
                sections += [f"### {_TITLES[table]}", *_tables(table, outcomes)]
        if self.outcomes:
            sections += ["### Start and memory", processes(self.outcomes), "### Versions", versions(self.outcomes)]
        if self.not_run:
            sections += ["### Not run", "\n".join(f"- {what}: {why}" for what, why in self.not_run.items())]
        return "\n\n".join(sections)


def _tables(table: str, outcomes: Sequence[Outcome]) -> list[str]:
    if table == CONTENTION:
        return [gaps(outcomes)]
    columns = list(dict.fromkeys(case.name for outcome in outcomes for case in outcome.run.cases))
    rows = {run.label: _row(run, outcomes) for run in _runs(outcomes)}
    tables = [speeds(list(rows.values()), columns)]
    own = [run.label for run in _runs(outcomes) if run.engine.name == KVRELAY]
    peers = [row for label, row in rows.items() if label not in own]
    return tables + [ratios(rows[label], peers, columns) for label in own if peers]


def _row(run: Run, outcomes: Iterable[Outcome]) -> Row:
    reports = [outcome.report for outcome in outcomes if outcome.run == run]
    return Row(
        run.label, {case.name: [report.samples[case.name].tokens_per_s for report in reports] for case in run.cases}
    )


def gaps(outcomes: Sequence[Outcome]) -> str:
    """The time between a sequence's tokens, of all rounds together, and what the prefill process did meanwhile."""
    rows = []
    for run in _runs(outcomes):
        own = [outcome for outcome in outcomes if outcome.run == run]
        prefilled = [outcome.busy_tokens_per_s for outcome in own if outcome.busy_tokens_per_s is not None]
        for case in run.cases:
            gaps_ms = [1e3 * gap for outcome in own for gap in outcome.report.samples[case.name].gaps_s]
            speed = statistics.median(outcome.report.samples[case.name].tokens_per_s for outcome in own)
            quantiles = [number(percentile(gaps_ms, percent)) for percent in (50, 99)]
            rows.append([run.label, case.name, *quantiles, number(speed), spread(prefilled)])
    return markdown(["", "case", "p50 ms", "p99 ms", "decode tokens/s", "prefill tokens/s beside it"], rows)


def processes(outcomes: Sequence[Outcome]) -> str:
    """Start and memory of each run's processes."""
    rows = []
    for run in _runs(outcomes):
        reports = [outcome.report for outcome in outcomes if outcome.run == run]
        facts = reports[-1].facts
        sizes = [int(facts[name]) for name in ("weights_bytes", "kv_bytes") if name in facts]
        peak = max(report.peak_rss_bytes for report in reports)
        rows.append(
            [
                run.name,
                spread([report.ready_s for report in reports]),
                f"{peak / MIB:,.0f}",
                *([f"{size / MIB:,.0f}" for size in sizes] or [NOTHING, NOTHING]),
                f"{peak / sum(sizes):.2f}" if sizes else NOTHING,
            ]
        )
    header = ["", "ready after s", "peak RSS MiB", "weights MiB", "KV pool MiB", "peak RSS over weights + KV"]
    return markdown(header, rows)


def versions(outcomes: Sequence[Outcome]) -> str:
    seen = {name: version for outcome in outcomes for name, version in outcome.report.versions.items()}
    decoders = {
        f"kvrelay with {outcome.run.weights} weights: {outcome.report.facts['decoder']}"
        for outcome in outcomes
        if "decoder" in outcome.report.facts
    }
    return ", ".join([*(f"{name} {version}" for name, version in seen.items()), *sorted(decoders)])


def _runs(outcomes: Iterable[Outcome]) -> list[Run]:
    runs: list[Run] = []
    for outcome in outcomes:
        if outcome.run not in runs:
            runs.append(outcome.run)
    return runs


def _fields(outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    return {
        "table": run.table,
        "row": run.label,
        "engine": run.engine.name,
        "threads": run.threads,
        "weights": run.weights,
        "round": outcome.round,
        "cpus_busy_before": outcome.cpus_busy_before,
        "busy_tokens_per_s": outcome.busy_tokens_per_s,
        **asdict(outcome.report),
    }
