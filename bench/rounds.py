"""Parts measured in turn, round after round, and what they gave: kept on disk as it comes, printed at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bench.engine import machine
from bench.engine.launch import WorkerFailedError
from bench.handoff.samples import Bar, Samples, bars_as_markdown

S = TypeVar("S")
Part = tuple[str, Callable[[S, Samples, int], None]]  # its name, and one round of it by its number


@dataclass(slots=True)
class Results:
    """Grows from part to part. `titles` are the tables' in the order in which they are shown."""

    about: dict[str, Any]
    titles: Mapping[str, str]
    samples: Samples = field(default_factory=Samples)
    bars: list[Bar] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    cpus_busy_before: list[float] = field(default_factory=list)  # by others, before each part

    def as_json(self) -> dict[str, Any]:
        fields = {"not_run": self.not_run, "cpus_busy_before": self.cpus_busy_before}
        return {**self.about, **fields, "samples": self.samples.as_json()}

    def as_markdown(self) -> str:
        sections = []
        for table, title in self.titles.items():
            if text := self.samples.as_markdown(table):
                sections += [f"### {title}", text]
        sections += ["### Bars", bars_as_markdown(self.bars, self.samples)]
        if self.not_run:
            sections += ["### Not run", "\n".join(f"- {what}: {why}" for what, why in self.not_run.items())]
        return "\n\n".join(sections)


def measure_all(
    parts: Sequence[Part[S]],
    setting: S,
    results: Results,
    *,
    num_rounds: int,
    wait_s: float,
    output: Path,
    say: Callable[[str], None],
) -> None:
    """Waits before each part for quiet CPUs, `wait_s` at most. A part that failed is not tried in later rounds."""
    for round_number in range(1, num_rounds + 1):
        for name, measure in parts:
            if name in results.not_run:
                continue
            results.cpus_busy_before.append(machine.wait_until_quiet(say, wait_s))
            say(f"round {round_number}: {name}")
            try:
                measure(setting, results.samples, round_number)
            except WorkerFailedError as error:
                say(str(error))
                results.not_run[name] = str(error).splitlines()[-1]
            output.write_text(json.dumps(results.as_json(), indent=1))
