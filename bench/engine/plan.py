"""What a run of the benchmark consists of: which engine measures which cases, for which table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.engine.case import Case, Task
from bench.engine.engines import KVRELAY, Engine

Weights = Literal["dtype", "file", "both"]
WEIGHTS: tuple[Weights, ...] = ("dtype", "file")

# Tables by the names that --rows takes.
BF16 = "bf16"
FOUR_BIT = "4bit"
CONTEXT = "context"
ONE_THREAD = "one-thread"
CONTENTION = "contention"
TABLES = (BF16, FOUR_BIT, CONTEXT, ONE_THREAD, CONTENTION)
OF_KVRELAY_ALONE = (CONTEXT, ONE_THREAD, CONTENTION)

MAIN_CASES = (
    *(Case("prefill", num_tokens) for num_tokens in (128, 512, 2048)),
    *(Case("decode", 256, batch) for batch in (1, 4, 16, 32, 64)),
)
CONTEXT_CASES = tuple(Case("decode", context, batch) for context in (256, 2048) for batch in (1, 4, 16))
CONTENTION_CASES = tuple(Case("decode", 512, batch) for batch in (1, 4))
BUSY_CASE = Case("prefill", 2048)
QUICK_CASES = (Case("prefill", 128), Case("prefill", 512), Case("decode", 256, 1), Case("decode", 256, 4))


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: --quick only shows that everything runs."""

    main_cases: tuple[Case, ...] = MAIN_CASES
    context_cases: tuple[Case, ...] = CONTEXT_CASES
    num_steps: int = 64
    num_contention_steps: int = 256


QUICK = Effort(QUICK_CASES, (Case("decode", 256, 1), Case("decode", 2048, 1)), 16, 32)


@dataclass(frozen=True, slots=True)
class Setting:
    """What the caller chose. `cpus` are the two that contention is measured on."""

    effort: Effort
    threads: int
    dtype: str
    decoder: str
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One row of one table: what one worker does in every round. `label` is the row's."""

    table: str
    label: str
    engine: Engine
    cases: tuple[Case, ...]
    num_steps: int
    threads: int
    dtype: str
    decoder: str
    weights: Weights = "dtype"
    cpus: tuple[int, ...] = ()
    beside_prefill: bool = False  # while another process prefills on another core

    @property
    def name(self) -> str:
        """The only one of its plan."""
        return f"{self.label} [{self.table}]"

    @property
    def model(self) -> Path:
        quantised = None if self.weights == "dtype" else self.engine.file
        return quantised or self.engine.model

    def task(self, vocab_size: int, seed: int) -> Task:
        return Task(
            model=str(self.model),
            threads=self.threads,
            cases=self.cases,
            num_steps=self.num_steps,
            vocab_size=vocab_size,
            seed=seed,
            spawned_at=0.0,
            dtype=self.dtype,
            weights=self.weights,
            decoder=self.decoder,
            cpus=self.cpus,
        )


def make_plan(tables: Collection[str], engines: dict[str, Engine], setting: Setting) -> list[Run]:
    """The runs of one round, those of one table side by side."""
    runs: list[Run] = []
    if BF16 in tables:
        runs += [_main(BF16, engine, setting, "dtype") for engine in engines.values()]
    if FOUR_BIT in tables:
        runs += [_main(FOUR_BIT, engine, setting, "file") for engine in engines.values() if engine.file]
        if KVRELAY in engines:
            runs.append(_main(FOUR_BIT, engines[KVRELAY], setting, "both"))
    if KVRELAY in engines:
        for weights in WEIGHTS:
            runs += [run for run in _of_kvrelay(engines[KVRELAY], setting, weights) if run.table in tables]
    return sorted(runs, key=lambda run: TABLES.index(run.table))


def _main(table: str, engine: Engine, setting: Setting, weights: Weights) -> Run:
    dtype = setting.dtype if engine.name == KVRELAY else "bfloat16"
    return Run(
        table=table,
        label=_label(engine, dtype, weights),
        engine=engine,
        cases=setting.effort.main_cases,
        num_steps=setting.effort.num_steps,
        threads=setting.threads,
        dtype=dtype,
        decoder=setting.decoder,
        weights=weights,
    )


def _of_kvrelay(engine: Engine, setting: Setting, weights: Weights) -> Iterator[Run]:
    effort, main = setting.effort, _main("", engine, setting, weights)
    yield replace(main, table=CONTEXT, cases=effort.context_cases)
    yield replace(main, table=ONE_THREAD, threads=1)
    for state, beside in (("idle", False), ("prefilling", True)):
        yield replace(
            main,
            table=CONTENTION,
            label=f"{main.label}, other core {state}",
            cases=CONTENTION_CASES,
            num_steps=effort.num_contention_steps,
            threads=1,
            cpus=setting.cpus[:1],
            beside_prefill=beside,
        )


def _label(engine: Engine, dtype: str, weights: Weights) -> str:
    if weights == "file":
        return f"{engine.label} (the file's weights)"
    if weights == "both":
        return f"{engine.label} (the file's weights and {dtype} ones)"
    return f"{engine.label} ({dtype} weights)" if engine.name == KVRELAY else engine.label
