"""The answers to one prompt, computed side by side: all of them, or none.

The first one goes ahead. The others queue, in front, once it has its first token: a decode node then has the prompt's
KV, finds all of its full blocks for them and computes the short rest. Each has a flow of its own, so each is resumed on
its own when a node is lost, which a fork of the first one's reservation could not outlive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.admission import Admission
from coordinator.ending import end_all
from coordinator.flow import Flow
from coordinator.lifetime import Edge, Stage
from kvrelay.inference import RequestFinished

OnFinished = Callable[[int, RequestFinished], None]  # index and account of an answer that is complete


class Choices:
    """Owns the flows and, of the queue, a kept place for each that has not entered it."""

    def __init__(self, flows: Sequence[Flow], admission: Admission, on_finished: OnFinished) -> None:
        self.flows = flows
        self._admission = admission
        self._on_finished = on_finished
        accepted = flows[0].state.accepted
        self._tenant = accepted.tenant
        self._tokens_each = accepted.sampling.max_tokens or 0  # of a later answer, whose prompt is cached by then
        self._num_kept = 0
        self._may_follow = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Answers that entered the queue and have not ended."""
        return sum(_is_open(flow) for flow in self.flows)

    def enter(self, client_id: str, now: float) -> None:
        """Takes or keeps a place for each answer. Raises OverloadedError when there are not enough; then none is.

        `client_id` is the id under which the client may send the request again, if it chose one.
        """
        num_answers = len(self.flows)
        num_tokens = self.flows[0].num_tokens_wanted() + (num_answers - 1) * self._tokens_each
        self._admission.check_room(
            self._tenant, now, num_places=num_answers, num_tokens=num_tokens, request_id=client_id
        )
        self._admission.got_in(self._tenant, client_id)
        self._num_kept = num_answers - 1
        self._admission.keep(self._tenant, now, self._num_kept, self._num_kept * self._tokens_each)
        self.flows[0].enter()

    def leave(self) -> None:
        """Gives up every place that is still held; also when `run` never began."""
        for flow in self.flows:
            flow.leave()
        self._give_back(self._num_kept)

    def note_first_token(self) -> None:
        """The first answer has begun, so the others may."""
        self._may_follow.set()

    def end(self, edge: Edge, detail: str) -> None:
        """Every answer that is open ends so."""
        for flow in self.flows:
            if _is_open(flow):
                flow.lifetime.take(edge, detail)

    async def run(self) -> RequestFinished:
        """Returns the account of them all. Whatever it raises, none of them goes on: KVRelayError when one failed."""
        tasks = [asyncio.create_task(self._run(0))]
        try:
            await self._may_follow.wait()
            if len(self.flows) > 1 and not _has_failed(tasks[0]):
                tasks += self._follow()
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task in done:
                    task.result()  # raises what it failed with
            return account_of([task.result() for task in tasks])
        finally:
            await end_all(tasks, "an answer")

    async def _run(self, index: int) -> RequestFinished:
        try:
            finished = await self.flows[index].run()
        finally:
            self._may_follow.set()
        self._on_finished(index, finished)
        if self.num_open:
            self._admission.changed()  # its room may be what another one waits for
        return finished

    def _follow(self) -> list[asyncio.Task[RequestFinished]]:
        followers = range(1, len(self.flows))
        for index in reversed(followers):  # each takes the first place
            self._give_back(1)
            self.flows[index].enter(front=True)
        return [asyncio.create_task(self._run(index)) for index in followers]

    def _give_back(self, num_places: int) -> None:
        self._num_kept -= num_places
        now = asyncio.get_running_loop().time()
        self._admission.give_back(self._tenant, num_places, num_places * self._tokens_each, now)


def account_of(finished: Sequence[RequestFinished]) -> RequestFinished:
    """One account of all answers to a prompt: the first one's, with what adds up added up."""
    first = finished[0]
    return replace(
        first,
        usage=replace(first.usage, completion_tokens=sum(one.usage.completion_tokens for one in finished)),
        timing=replace(first.timing, total_s=max(one.timing.total_s for one in finished)),
        handoff_bytes=sum(one.handoff_bytes for one in finished),
        retries=sum(one.retries for one in finished),
    )


def _is_open(flow: Flow) -> bool:
    return flow.lifetime.stage not in (None, Stage.ENDED)


def _has_failed(task: asyncio.Task[RequestFinished]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
