"""Which prompts a prefill node works on, and how many tokens of each one step computes.

Pure: no torch, no pool, no clock. `share_budget` decides one step; `PrefillScheduler` keeps the order of requests.

Two bounds follow from `share_budget`, with B the token budget of a step and S = B // OLDEST_SHARE (at least 1):
- the oldest prompt advances by min(S, chunk_tokens) tokens or to its end in every step, so no prompt starves;
- longer prompts take at most S tokens of a step from a shorter one that wants them: it and those as short share at
  least B - S, so a prompt of r tokens that is the shortest ends after ceil(r / min(B - S, chunk_tokens)) steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NewType

from kvrelay.errors import OverloadedError

JobId = NewType("JobId", int)  # one Prefill call; a request id may come again while its first call still ends

OLDEST_SHARE = 4  # the oldest prompt is sure of a quarter of the budget: short ones come first, long ones still end


def share_budget(remaining: Sequence[int], *, budget: int, chunk_tokens: int) -> list[int]:
    """How many tokens of each prompt to compute now; `remaining` lists uncomputed tokens, oldest prompt first.

    The oldest prompt's share comes first, then the shortest remaining prompts, older ones first among equals.
    The sum is at most `budget`, no entry above `chunk_tokens`; work left over means that the budget is used up or
    that every prompt has its whole chunk.
    """
    granted = [0] * len(remaining)
    if not remaining:
        return granted
    granted[0] = min(remaining[0], chunk_tokens, max(1, budget // OLDEST_SHARE))
    left = budget - granted[0]
    for index in sorted(range(len(remaining)), key=lambda i: (remaining[i], i)):
        more = min(remaining[index], chunk_tokens) - granted[index]
        more = min(more, left)
        granted[index] += more
        left -= more
    return granted


class PrefillScheduler:
    """The order of jobs: waiting (first come, first admitted), admitted (a slot is theirs), computing.

    A job takes a slot when it is admitted and gives it back when it ends or its prompt is computed; sending the last
    blocks needs none. `max_waiting` bounds the queue, which stays shallow since the coordinator keeps the long one.
    """

    def __init__(self, *, max_batched_tokens: int, chunk_tokens: int, max_prefills: int, max_waiting: int) -> None:
        self._max_batched_tokens = max_batched_tokens
        self._chunk_tokens = chunk_tokens
        self._max_prefills = max_prefills
        self._max_waiting = max_waiting
        self._waiting: deque[JobId] = deque()
        self._admitted: dict[JobId, None] = {}  # in order of admission
        self._remaining: dict[JobId, int] = {}  # computing jobs: uncomputed tokens

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_slots_free(self) -> int:
        """Jobs that `enqueue` would take now."""
        return max(0, self._max_prefills + self._max_waiting - len(self._admitted) - len(self._waiting))

    @property
    def has_chunks(self) -> bool:
        return bool(self._remaining)

    def enqueue(self, job_id: JobId) -> None:
        """Raises OverloadedError when the shallow queue is full."""
        if self.num_slots_free == 0:
            raise OverloadedError(
                f"this prefill node has {len(self._admitted)} prompts in work and {len(self._waiting)} waiting; "
                "send the request to another node or later",
                retry_after_s=1.0,
            )
        self._waiting.append(job_id)

    def head(self) -> JobId | None:
        """The job to admit next; None when none waits or every slot is taken. Later jobs never pass it."""
        if not self._waiting or len(self._admitted) >= self._max_prefills:
            return None
        return self._waiting[0]

    def admit_head(self) -> None:
        self._admitted[self._waiting.popleft()] = None

    def start(self, job_id: JobId, num_uncomputed: int) -> None:
        """The admitted job's prefix is loaded; `num_uncomputed` tokens, at least one, are to compute."""
        if job_id not in self._admitted:
            raise KeyError(job_id)
        self._remaining[job_id] = num_uncomputed

    def schedule(self) -> list[tuple[JobId, int]]:
        """The chunks of this step as (job, number of tokens), oldest job first; none empty."""
        job_ids = [job_id for job_id in self._admitted if job_id in self._remaining]
        granted = share_budget(
            [self._remaining[job_id] for job_id in job_ids],
            budget=self._max_batched_tokens,
            chunk_tokens=self._chunk_tokens,
        )
        return [(job_id, count) for job_id, count in zip(job_ids, granted, strict=True) if count]

    def advance(self, job_id: JobId, num_tokens: int) -> None:
        """`num_tokens` were computed; a job whose prompt is done gives its slot back."""
        self._remaining[job_id] -= num_tokens
        if self._remaining[job_id] == 0:
            self.remove(job_id)

    def remove(self, job_id: JobId) -> None:
        """Forgets the job wherever it is; nothing happens when it is not here."""
        self._remaining.pop(job_id, None)
        if job_id in self._admitted:
            del self._admitted[job_id]
        elif job_id in self._waiting:
            self._waiting.remove(job_id)
