"""A worker of the benchmark whose engine computes nothing: a process for the tests of what runs workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.engine.case import Task
from bench.engine.worker import Prompts, work


class IdleEngine:
    """Its model's name says how it behaves: `broken` ones cannot be loaded."""

    def __init__(self, task: Task) -> None:
        sys.stdout.write("noise of a library\n")
        if task.model == "broken":
            raise RuntimeError("the model is broken")

    def generate(self, prompts: Prompts, num_tokens: int) -> Iterator[int]:
        assert all(len(set(prompt)) == len(prompt) for prompt in prompts), "token ids are distinct"
        for _ in range(num_tokens):
            yield len(prompts)

    def facts(self) -> dict[str, int | str]:
        return {"weights_bytes": 7}


if __name__ == "__main__":
    work(IdleEngine, "pytest")
