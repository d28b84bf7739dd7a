"""The real model on the GPU against the reference tokens: chunked prompts, one batch, recorded decode steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.engine.load import load_engine
from kvrelay.sampling import SamplingParams
from tests.support import golden
from tests.support.gpu import NEEDS_GPU
from tests.support.together import answer_together

pytestmark = NEEDS_GPU

NUM_TOKENS = 64


@pytest.mark.parametrize(
    ("dtype", "reference", "margin"),
    [("float32", golden.FLOAT32, 0.001), ("bfloat16", golden.BFLOAT16_WEIGHTS, 0.3)],
)
@pytest.mark.parametrize("max_decode_rows", [0, 32], ids=["eager", "recorded"])
def test_reference_tokens(demo_model: Path, dtype: str, reference: str, margin: float, max_decode_rows: int) -> None:
    cases = golden.load(reference)
    engine = load_engine(demo_model, dtype=dtype, num_blocks=1024, device="cuda", max_decode_rows=max_decode_rows)
    assert engine.info.attention_backend != "torch-plain", "install triton"
    answers = answer_together(engine, [case.prompt_ids for case in cases], NUM_TOKENS)
    for case, answer in zip(cases, answers, strict=True):
        certain = min(NUM_TOKENS, case.num_certain(margin))
        assert answer[:certain] == list(case.output_ids[:certain]), case.name


def test_draws_are_those_of_a_cpu(demo_model: Path) -> None:
    """In float32, up to near-ties of the noise: most answers are equal to their ends, all begin alike."""
    prompts = [case.prompt_ids for case in golden.load()[:6]]
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
    on_cpu, on_gpu = (
        answer_together(
            load_engine(demo_model, dtype="float32", num_blocks=512, device=device, decoder="torch", max_decode_rows=8),
            *(prompts, 24),
            sampling=sampling,
        )
        for device in ("cpu", "cuda")
    )
    assert [answer[0] for answer in on_gpu] == [answer[0] for answer in on_cpu]
    assert sum(a == b for a, b in zip(on_gpu, on_cpu, strict=True)) >= 5
