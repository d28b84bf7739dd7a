"""Whether a request can meet the latencies it was promised, and when it could. Pure; times are seconds of one clock.

What cannot is refused at once, so that the cluster computes what is of use ("early rejection": Qin et al., "Mooncake",
2024). Whoever was told to come back then finds room: newcomers keep clear of it. Times are told at
the pace that is due to the tenant (`coordinator.dues`), and one that has had more than its part keeps clear of more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.dues import Dues
from coordinator.forecast import Forecast
from coordinator.last_heard import LastHeard
from coordinator.promises import MARGIN, MIN_RETRY_AFTER_S, Promises
from coordinator.tenant_policy import TenantPolicy
from kvrelay.errors import OverloadedError, TargetOutOfReachError
from kvrelay.inference import GenerateRequest

LEAD_S = 1.0  # room is kept from so long before the time told; more would leave it empty
NEWCOMERS_PART = 0.8  # of its target within which a prediction must be while others were told to come back
AHEAD_PART = 0.6  # the same where its tenant has had more, over weight, than one that is refused
_MAX_TENANTS = 1_000  # whose promises are kept
_SMOOTHING = 0.1  # weight of the newest answer's time in the running mean

OnRefused = Callable[[str], None]  # "ttft" or "itl": the target that is out of reach


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds until the first token, and between two in the mean of an answer. None: whatever it takes."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def are_set(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None


NO_TARGETS = Targets()


def targets_of(request: GenerateRequest, policy: TenantPolicy) -> Targets:
    """The request's own, which have been checked, or else its tenant's."""
    return Targets(
        (policy.ttft_s or None) if request.ttft_target_s is None else request.ttft_target_s,
        (policy.itl_s or None) if request.itl_target_s is None else request.itl_target_s,
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a request that came now. Unknown parts count as nothing: who cannot be told no is let in."""

    wait_s: float  # in the coordinator, until a node has room
    forecast: Forecast | None  # from then on
    tokens_per_s: float | None  # at which room comes free, of all tenants'
    num_tokens: int  # that it wants: of the prompt, what is not cached
    num_positions: int  # of prompt and answers: the same whenever it comes
    # By nodes' rates, of the quickest with nothing beside it: it need not be where it would go now. 0: not known
    quickest_ttft_s: float = math.inf
    quickest_itl_s: float = math.inf

    @property
    def ttft_s(self) -> float:
        return self.wait_s + (self.forecast.ttft_s if self.forecast else 0.0)

    @property
    def itl_s(self) -> float:
        return self.forecast.itl_s if self.forecast else 0.0

    @property
    def least_ttft_s(self) -> float:
        """However short the queues become."""
        return min(self.forecast.ttft_s - self.forecast.queue_s, self.quickest_ttft_s) if self.forecast else 0.0

    @property
    def least_itl_s(self) -> float:
        """With nothing beside it; 0 where that is not known."""
        return min(self.forecast.least_itl_s, self.quickest_itl_s) if self.forecast else 0.0


class _Pace(NamedTuple):
    """As `coordinator.promises` want it; what is called places there are positions here."""

    positions_per_s: float | None

    def seconds_for(self, num_places: int, num_tokens: int, now: float) -> float | None:
        return num_tokens / self.positions_per_s if self.positions_per_s else None

    def seconds(self, num_positions: int) -> float:
        return num_positions / self.positions_per_s if self.positions_per_s else 0.0

    def times(self, part: float) -> _Pace:
        return _Pace(self.positions_per_s and self.positions_per_s * part)


class _Bounds(NamedTuple):
    """Of what a request may take of its targets."""

    part: float  # within which a prediction must be
    kept_s: float  # of the wait, left to others
    is_ahead: bool = False  # its tenant has had more than its part
    most_s: float = math.inf  # until its first token: then one that was told to come has to be begun


class SloAdmission:
    """Of one model."""

    def __init__(
        self, on_refused: OnRefused = lambda target: None, weight_of: Callable[[str], float] = lambda tenant: 1.0
    ) -> None:
        self._on_refused = on_refused
        self._dues = Dues(weight_of)
        self._promises = LastHeard(lambda: Promises(LEAD_S), _MAX_TENANTS)
        self._answer_s = 0.0  # from the first token to the last, in the mean of late

    def note_answer(self, seconds: float) -> None:
        """An answer took so long from its first token to its last."""
        self._answer_s += _SMOOTHING * (seconds - self._answer_s) if self._answer_s else seconds

    def check(
        self,
        tenant: str,
        request_id: str,
        targets: Targets,
        prediction: Prediction,
        now: float,
        *,
        best_effort: bool,
    ) -> bool:
        """Whether the targets are in reach. Where they are not, raises OverloadedError that says when they will be, or
        TargetOutOfReachError, unless the request shall run all the same. `request_id` is the client's own, or empty."""
        pace = _Pace(self._dues.positions_per_s(now) or prediction.tokens_per_s)
        promises = self._promises.of(tenant)
        bounds = self._bounds(promises, tenant, request_id, prediction, pace, now)
        refusal = _too_late(targets, prediction, bounds) or self._too_slow(targets, prediction, bounds)
        if refusal is None:
            promises.forget(request_id)
            self._dues.let_in(tenant, prediction.num_tokens, prediction.num_positions, now)
            return True
        if best_effort:
            return False
        delay_s = 0.0
        if not refusal.is_for_good:
            self._dues.refused(tenant, now)
            delay_s = self._tell(promises, tenant, request_id, targets, prediction, pace, refusal, now)
        self._on_refused(refusal.target)
        if refusal.is_for_good:
            raise TargetOutOfReachError(f"the request {refusal.why}; ask for a longer one, or as best effort")
        when = f"try again in about {delay_s:.1f} s"
        raise OverloadedError(f"the request {refusal.why}; {when}, or as best effort", retry_after_s=delay_s)

    def _bounds(
        self, own: Promises, tenant: str, request_id: str, prediction: Prediction, pace: _Pace, now: float
    ) -> _Bounds:
        """All that it has, of one that was told to come now. Others leave room to those, but for those of tenants that
        have had more than their own, and stop sooner where their own has had more than another."""
        num_kept = own.num_kept(request_id, pace, now, prediction.num_positions)
        if own.waits_for(request_id, now):
            return _Bounds(1.0, pace.seconds(num_kept))
        if not any(promises for _, promises in self._promises):
            return _Bounds(1.0, 0.0)
        others = [
            promises
            for name, promises in self._promises
            if promises and promises is not own and not self._dues.is_behind(tenant, name, now)
        ]
        num_kept += sum(promises.num_kept("", pace, now) for promises in others)
        most_s = min(promises.begun_by(now, pace) for promises in (own, *others)) - now
        is_ahead = self._dues.is_ahead(tenant, now)
        return _Bounds(AHEAD_PART if is_ahead else NEWCOMERS_PART, pace.seconds(num_kept), is_ahead, most_s)

    def _tell(
        self,
        promises: Promises,
        tenant: str,
        request_id: str,
        targets: Targets,
        prediction: Prediction,
        pace: _Pace,
        refusal: _Refusal,
        now: float,
    ) -> float:
        return promises.tell(
            request_id,
            prediction.num_positions,
            prediction.num_positions,
            pace.times(self._dues.part(tenant, now)),
            prediction.forecast.prefill_s if prediction.forecast else 0.0,
            now,
            max(MIN_RETRY_AFTER_S, refusal.excess_s * MARGIN),
            math.inf if targets.ttft_s is None else targets.ttft_s - prediction.least_ttft_s,
        )

    def _too_slow(self, targets: Targets, prediction: Prediction, bounds: _Bounds) -> _Refusal | None:
        """Answers end at an even pace: for a step to take less by a part, about that part of them has to."""
        limit_s, itl_s = targets.itl_s, prediction.itl_s
        if limit_s is None or itl_s <= limit_s * bounds.part:
            return None
        compared = _compared(itl_s, limit_s, bounds)
        why = f"would get a token every {_ms(itl_s)} on average, {compared} the {_ms(limit_s)} asked for"
        if prediction.least_itl_s > limit_s:
            return _Refusal("itl", f"{why}, with nothing beside it", 0.0, is_for_good=True)
        return _Refusal("itl", why, (1 - limit_s * NEWCOMERS_PART / itl_s) * self._answer_s)


@dataclass(frozen=True, slots=True)
class _Refusal:
    target: str
    why: str  # the predicate of a sentence
    excess_s: float  # until it is in reach if nothing else came
    is_for_good: bool = False


def _too_late(targets: Targets, prediction: Prediction, bounds: _Bounds) -> _Refusal | None:
    """No more than half of what may wait is left to others: they may not come."""
    limit_s, ttft_s = targets.ttft_s, prediction.ttft_s
    if limit_s is None:
        return None
    kept_s = min(bounds.kept_s, limit_s / 2)
    if ttft_s + kept_s <= limit_s * bounds.part and ttft_s <= bounds.most_s:
        return None
    compared = _compared(ttft_s, limit_s, bounds)
    why = f"would get its first token in about {_s(ttft_s)}, {compared} the {limit_s:g} s asked for"
    if prediction.least_ttft_s > limit_s:
        why += f", {_s(prediction.least_ttft_s)} of them without any wait"
        return _Refusal("ttft", why, 0.0, is_for_good=True)
    return _Refusal("ttft", why, ttft_s + kept_s - limit_s * NEWCOMERS_PART)


def _compared(predicted_s: float, limit_s: float, bounds: _Bounds) -> str:
    if predicted_s > limit_s:
        return "more than"
    whom = "tenants that have had less of their share" if bounds.is_ahead else "others told to come back before it"
    return f"too near, with {whom}, to"


def _s(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
