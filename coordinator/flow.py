"""One request's life: wait for room, compute, and again elsewhere when a node is lost.

Who owns what: while a request waits it owns a place in the queue; from a granted Reserve on it owns a reservation,
which ends when its answer does or by Release; its calls to nodes end with the attempt that made them. So whatever ends
the task that runs the flow frees everything it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.admission import Admission
from coordinator.attempt import Attempt, NoPrefillSlotError, OnRetry, count_retry
from coordinator.cluster import Cluster
from coordinator.lifetime import Edge, Lifetime
from coordinator.placement import Limits, Placement, Placer
from coordinator.request import RequestState
from coordinator.slo import Prediction
from kvrelay.errors import KVRelayError
from kvrelay.inference import RequestFinished, TokensGenerated


class Flow:
    """Runs one request. `emit` takes what the client gets; `on_retry` hears what kind of node failed."""

    def __init__(
        self,
        state: RequestState,
        cluster: Cluster,
        admission: Admission,
        limits: Limits,
        lifetime: Lifetime,
        *,
        emit: Callable[[TokensGenerated], None],
        on_retry: OnRetry,
    ) -> None:
        self.state = state
        self.lifetime = lifetime
        self._limits = limits
        self._on_retry = on_retry
        self._placer = Placer(state, cluster, admission, limits, lifetime)
        self._attempt = Attempt(state, cluster, limits, lifetime, emit=emit, on_retry=on_retry)

    def enter(self, *, front: bool = False) -> None:
        """Takes a place among its tenant's in the queue, or the first of all."""
        self._placer.enter(front=front)
        prompt_tokens, most = self.state.num_prompt_tokens, self.state.answer.num_left
        self.lifetime.take(Edge.ACCEPTED, f"{prompt_tokens} prompt tokens, {most} to generate at most")

    def num_tokens_wanted(self) -> int:
        """What the answer costs its tenant."""
        return self._placer.demand().num_tokens

    def predict(self) -> Prediction:
        """What the answer would get if it entered the queue now."""
        return self._placer.predict()

    def leave(self) -> None:
        """Gives up the place in the queue; for a flow whose task may never have run."""
        self._placer.leave()

    async def run(self) -> RequestFinished:
        """Raises KVRelayError when no complete answer is to be had."""
        while self.state.answer.reason is None:
            placement = await self._placer.place()
            try:
                await self._attempt.run(placement)
            except NoPrefillSlotError as error:
                self.lifetime.take(Edge.REFUSED, error.message)
                self._placer.enter_again(refused=True)
            except KVRelayError as error:
                if self.state.answer.reason is None:
                    self._go_elsewhere(error, placement)
        self.lifetime.take(Edge.FINISHED, self.state.answer.reason.value)
        return self.state.finished(time.monotonic())

    def _go_elsewhere(self, error: KVRelayError, placement: Placement | None) -> None:
        """Queues again, in front; raises `error` when it must not, or may no more, be tried again."""
        where = "the prefill node" if placement is None else placement.address
        if placement is None:
            count_retry(self.state, "prefill", where, error, self._limits, self._on_retry)
        else:
            count_retry(self.state, "decode", where, error, self._limits, self._on_retry)
            self.state.avoid.add((placement.decode.info.instance_id,))
        self.lifetime.take(Edge.RESUMED, f"{where} failed: {error.message}")
        self._placer.enter_again(refused=False)
