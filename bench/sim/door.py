"""Who is let in, and what the others are told: coordinator.slo, then the queue's bounds."""

from __future__ import annotations

from collections.abc import Callable

from bench.sim.placing import Placing
from bench.sim.request import Outcome, SimRequest
from bench.sim.view import View
from coordinator.admission import Admission
from coordinator.queue import Demand
from coordinator.slo import Prediction, SloAdmission, Targets
from kvrelay.errors import OverloadedError


class Door:
    """`targets_of` gives what a tenant's requests want."""

    def __init__(
        self,
        view: View,
        admission: Admission,
        placing: Placing,
        targets_of: Callable[[str], Targets],
        weight_of: Callable[[str], float],
    ) -> None:
        self._view = view
        self._admission = admission
        self._placing = placing
        self._targets_of = targets_of
        self._slo = SloAdmission(weight_of=weight_of)

    def note_answer(self, seconds: float) -> None:
        """One took so long from its first token to its last."""
        self._slo.note_answer(seconds)

    def why_not(self, request: SimRequest, demand: Demand, now: float) -> Outcome | None:
        """None when it is let in; else it is told when to come back."""
        tenant, request_id = request.arrival.tenant, request.request_id
        outcome = Outcome.OUT_OF_REACH
        try:
            self._check_targets(request, demand, now)
            outcome = Outcome.TURNED_AWAY
            self._admission.check_room(tenant, now, num_tokens=demand.num_tokens, request_id=request_id)
        except OverloadedError as error:
            request.told_s = error.retry_after_s
            return outcome
        self._admission.got_in(tenant, request_id)
        return None

    def _check_targets(self, request: SimRequest, demand: Demand, now: float) -> None:
        """Raises OverloadedError for one whose targets are out of reach."""
        arrival = request.arrival
        targets = self._targets_of(arrival.tenant)
        if not targets.are_set:
            return
        prediction = Prediction(
            wait_s=self._admission.wait_s(demand, self._view.num_tokens_free(), now),
            forecast=self._placing.forecast(request, self._view.known(request)),
            tokens_per_s=self._admission.tokens_per_s(now),
            num_tokens=demand.num_tokens,
            num_positions=arrival.num_prompt + arrival.max_tokens,
        )
        request.predicted_s = prediction.ttft_s
        self._slo.check(arrival.tenant, request.request_id, targets, prediction, now, best_effort=False)
