"""transformers: eager forward passes over a dynamic cache, scaled dot product attention, one batch of equal lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bench.engine.case import Task
from bench.engine.worker import Prompts, work


class TransformersEngine:
    def __init__(self, task: Task) -> None:
        torch.set_num_threads(task.threads)
        self._model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.bfloat16, attn_implementation="sdpa")

    @torch.inference_mode()
    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        cache = DynamicCache(config=self._model.config)
        ids_BT = torch.tensor(prompts)
        for _ in range(num_tokens):
            output = self._model(ids_BT, cache=cache, use_cache=True, logits_to_keep=1)
            ids_BT = output.logits[:, -1].argmax(-1, keepdim=True)
            yield len(ids_BT.tolist())

    def facts(self) -> dict[str, int | str]:
        return {}


if __name__ == "__main__":
    work(TransformersEngine, "transformers", "torch")
