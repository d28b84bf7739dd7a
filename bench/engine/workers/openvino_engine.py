"""OpenVINO GenAI's continuous batching pipeline, bfloat16 computation and KV, from a float16 GGUF file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import openvino
import openvino_genai

from bench.engine.case import Task
from bench.engine.worker import Prompts, work

KV_GIB = 1
MAX_BATCHED_TOKENS = 2048


class OpenVINOEngine:
    def __init__(self, task: Task) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = task.max_batch
        scheduler.cache_size = KV_GIB
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": task.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",  # its default on a CPU is 8 bits
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(task.model, scheduler, "CPU", properties)
        self._ids = itertools.count()

    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            self._pipeline.add_request(next(self._ids), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            yield sum(map(_num_new, handles))

    def facts(self) -> dict[str, int | str]:
        return {}


def _num_new(handle: openvino_genai.GenerationHandle) -> int:
    count = 0
    while handle.can_read():
        count += sum(len(output.generated_ids) for output in handle.read().values())
    return count


if __name__ == "__main__":
    work(OpenVINOEngine, "openvino-genai", "openvino")
