"""The worker that runs kvrelay's own engine, on a tiny model."""

from __future__ import annotations

import gguf
import pytest

from bench.engine.case import Case, Task
from bench.engine.workers.kvrelay_engine import KVRelayEngine
from tests.support.tiny_gguf import make_tiny_gguf
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> KVRelayEngine:
    directory = tmp_path_factory.mktemp("model")
    source = make_tiny_model(directory / "tiny")
    model = make_tiny_gguf(source, directory / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    cases = (Case("prefill", 600), Case("decode", 64, batch=2))
    return KVRelayEngine(Task(str(model), 1, cases, num_steps=4, vocab_size=288, seed=0, spawned_at=0.0))


def test_prompts_run_one_by_one_and_then_all_sequences_together(engine: KVRelayEngine) -> None:
    assert list(engine.generate([[5, 6, 7], [8, 9, 10]], 3)) == [1, 1, 2, 2]


def test_a_long_prompt_runs_in_a_prefill_nodes_chunks(engine: KVRelayEngine) -> None:
    assert list(engine.generate([[5] * 600], 2)) == [0, 1, 1]


def test_facts_are_the_weights_in_their_type_and_the_pool(engine: KVRelayEngine) -> None:
    matrices = 288 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 128 * 3)
    norms = 5 * 64
    token_bytes = 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head dim, bfloat16

    facts = engine.facts()
    assert facts.pop("decoder") != ""
    assert facts == {"weights_bytes": matrices * 2 + norms * 4, "kv_bytes": 38 * 16 * token_bytes}
