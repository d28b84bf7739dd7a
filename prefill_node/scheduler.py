"""Which prompts a prefill node works on, and how many tokens of each one step computes.

Pure: no torch, no pool, no clock. `share_budget` decides one step; `PrefillScheduler` keeps the order of requests.

Two bounds follow from `share_budget`, with B the token budget of a step and S = B // OLDEST_SHARE (at least 1):
- the oldest prompt advances by min(S, chunk_tokens) tokens or to its end in every step, so no prompt starves;
- longer prompts take at most S tokens of a step from a shorter one that wants them: it and those as short share at
  least B - S, so a prompt of r tokens that is the shortest ends after ceil(r / min(B - S, chunk_tokens)) steps.
A short prompt, one that can be computed in a single step, does not wait for a long one's place either: there are as
many places again for short ones alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NewType

from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.errors import OverloadedError
from kvrelay.limits import PrefillLimits

JobId = NewType("JobId", int)  # one Prefill call; a request id may come again while its first call still ends

OLDEST_SHARE = 4  # the oldest prompt is sure of a quarter of the budget: short ones come first, long ones still end


def _oldest_share(budget: int) -> int:
    return max(1, budget // OLDEST_SHARE)


def share_budget(remaining: Sequence[int], *, budget: int, chunk_tokens: int) -> list[int]:
    """How many tokens of each prompt to compute now; `remaining` lists uncomputed tokens, oldest prompt first.

    The oldest prompt's share comes first, then the shortest remaining prompts, older ones first among equals.
    The sum is at most `budget`, no entry above `chunk_tokens`; work left over means that the budget is used up or
    that every prompt has its whole chunk.
    """
    granted = [0] * len(remaining)
    if not remaining:
        return granted
    granted[0] = min(remaining[0], chunk_tokens, _oldest_share(budget))
    left = budget - granted[0]
    for index in sorted(range(len(remaining)), key=lambda i: (remaining[i], i)):
        more = min(remaining[index], chunk_tokens) - granted[index]
        more = min(more, left)
        granted[index] += more
        left -= more
    return granted


class PrefillScheduler:
    """The order of jobs: waiting, admitted (a place is theirs), computing.

    A job takes a place when it is admitted and gives it back when it ends or its prompt is computed; sending the last
    blocks needs none. `max_waiting` bounds the queue, which stays shallow since the coordinator keeps the long one.
    `limits` may be replaced between steps.
    """

    def __init__(self, limits: PrefillLimits, size: AdaptiveBound | None = None) -> None:
        """`size` says what a step takes of `max_batched_tokens`; None: all.

        Raises InvalidRequestError for limits out of range.
        """
        limits.validate()
        self.limits = limits
        self._size = size
        self._waiting: deque[JobId] = deque()
        self._admitted: dict[JobId, None] = {}  # in order of admission
        self._extra: set[JobId] = set()  # those of them in a place for short prompts
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
        taken = len(self._admitted) - len(self._extra) + len(self._waiting)
        return max(0, self.limits.max_prefills + self.limits.max_waiting - taken)

    @property
    def short_tokens(self) -> int:
        """A prompt of no more uncomputed tokens is short: one step computes it, whatever longer ones there are."""
        budget = self.step_tokens
        return min(self.limits.chunk_tokens, budget - _oldest_share(budget))

    @property
    def step_tokens(self) -> int:
        """Tokens that the next step computes at most."""
        most = self.limits.max_batched_tokens
        return most if self._size is None else self._size.of(most)

    @property
    def has_chunks(self) -> bool:
        return bool(self._remaining)

    @property
    def num_remaining_tokens(self) -> int:
        """Uncomputed tokens of the jobs that compute."""
        return sum(self._remaining.values())

    @property
    def waiting(self) -> tuple[JobId, ...]:
        """In order of arrival."""
        return tuple(self._waiting)

    def enqueue(self, job_id: JobId) -> None:
        """Raises OverloadedError when the shallow queue is full."""
        if self.num_slots_free == 0:
            raise OverloadedError(
                f"this prefill node has {len(self._admitted)} prompts in work and {len(self._waiting)} waiting; "
                "send the request to another node or later",
                retry_after_s=1.0,
            )
        self._waiting.append(job_id)

    def may_admit(self, num_uncomputed: int) -> bool:
        """Whether there is a place for a prompt of so many uncomputed tokens."""
        if self._has_place():
            return True
        return num_uncomputed <= self.short_tokens and len(self._extra) < self.limits.max_prefills

    def admit(self, job_id: JobId) -> None:
        """Gives a waiting job the place that `may_admit` spoke of."""
        if not self._has_place():
            self._extra.add(job_id)
        self._waiting.remove(job_id)
        self._admitted[job_id] = None

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
            budget=self.step_tokens,
            chunk_tokens=self.limits.chunk_tokens,
        )
        return [(job_id, count) for job_id, count in zip(job_ids, granted, strict=True) if count]

    def waited(self, seconds: float) -> None:
        """A job that came during a step could take part in the next one after so long."""
        if self._size is not None:
            self._size.waited(seconds)

    def stepped(self, num_tokens: int) -> None:
        """The step just planned computed so many tokens."""
        if self._size is not None:
            self._size.stepped(is_full=num_tokens >= self.step_tokens)

    def advance(self, job_id: JobId, num_tokens: int) -> None:
        """`num_tokens` were computed; a job whose prompt is done gives its slot back."""
        self._remaining[job_id] -= num_tokens
        if self._remaining[job_id] == 0:
            self.remove(job_id)

    def remove(self, job_id: JobId) -> None:
        """Forgets the job wherever it is; nothing happens when it is not here."""
        self._remaining.pop(job_id, None)
        self._extra.discard(job_id)
        if job_id in self._admitted:
            del self._admitted[job_id]
        elif job_id in self._waiting:
            self._waiting.remove(job_id)

    def _has_place(self) -> bool:
        return len(self._admitted) - len(self._extra) < self.limits.max_prefills
