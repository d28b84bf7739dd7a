"""Which runs a table asks for."""

from __future__ import annotations

from pathlib import Path

from bench.engine.engines import Engine
from bench.engine.plan import TABLES, Effort, Setting, make_plan

FILE = Path("file.gguf")
ENGINES = {
    "llama.cpp": Engine("llama.cpp", "llama.cpp", Path("python"), "worker", Path("bf16.gguf"), FILE),
    "vllm": Engine("vllm", "vLLM CPU", Path("python"), "worker", Path("directory")),
    "kvrelay": Engine("kvrelay", "kvrelay", Path("python"), "worker", FILE, FILE),
}
SETTING = Setting(Effort(), threads=2, dtype="float32", decoder="auto", cpus=(3, 5))


def test_every_engine_runs_16_bits_and_only_those_that_can_run_the_file() -> None:
    runs = make_plan(["4bit", "bf16"], ENGINES, SETTING)

    assert [(run.table, run.label, run.model.name, run.dtype) for run in runs] == [
        ("bf16", "llama.cpp", "bf16.gguf", "bfloat16"),
        ("bf16", "vLLM CPU", "directory", "bfloat16"),
        ("bf16", "kvrelay (float32 weights)", "file.gguf", "float32"),
        ("4bit", "llama.cpp (the file's weights)", "file.gguf", "bfloat16"),
        ("4bit", "kvrelay (the file's weights)", "file.gguf", "float32"),
        ("4bit", "kvrelay (the file's weights and float32 ones)", "file.gguf", "float32"),
    ]


def test_one_thread_and_one_core_are_kvrelays_own() -> None:
    runs = make_plan(["one-thread", "contention"], ENGINES, SETTING)

    assert {run.engine.name for run in runs} == {"kvrelay"}
    assert {run.threads for run in runs} == {1}
    assert [(run.cpus, run.beside_prefill) for run in runs if run.table == "contention"] == [
        ((3,), False),
        ((3,), True),
    ] * 2


def test_without_kvrelay_there_are_only_its_peers_rows() -> None:
    peers = {name: engine for name, engine in ENGINES.items() if name != "kvrelay"}

    assert {run.table for run in make_plan(TABLES, peers, SETTING)} == {"bf16", "4bit"}


def test_names_are_unique() -> None:
    names = [run.name for run in make_plan(TABLES, ENGINES, SETTING)]

    assert len(names) == len(set(names))
