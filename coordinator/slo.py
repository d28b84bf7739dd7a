"""Whether a request can meet the latencies it was promised, and when it could. Pure; times are seconds of one clock.

What cannot is refused at once, so that the cluster computes what is of use ("early rejection": Qin et al., "Mooncake",
2024). Whoever was told to come back then finds room: newcomers keep clear of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.forecast import Forecast
from coordinator.promises import MARGIN, MIN_RETRY_AFTER_S, Promises
from coordinator.tenant_policy import TenantPolicy
from kvrelay.errors import OverloadedError
from kvrelay.inference import GenerateRequest

LEAD_S = 1.0  # room is kept from so long before the time told; more would leave it empty
NEWCOMERS_PART = 0.8  # of its target within which a prediction must be while others were told to come back
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
    tokens_per_s: float | None  # at which room comes free for its tenant
    num_tokens: int  # that it wants: of the prompt, what is not cached
    num_positions: int  # of prompt and answers: the same whenever it comes

    @property
    def ttft_s(self) -> float:
        return self.wait_s + (self.forecast.ttft_s if self.forecast else 0.0)

    @property
    def itl_s(self) -> float:
        return self.forecast.itl_s if self.forecast else 0.0

    @property
    def least_ttft_s(self) -> float:
        """However short the queues become."""
        return self.forecast.ttft_s - self.forecast.queue_s if self.forecast else 0.0

    @property
    def least_itl_s(self) -> float:
        """With nothing beside it; 0 where that is not known."""
        return self.forecast.least_itl_s if self.forecast else 0.0

    def seconds_for(self, num_places: int, num_tokens: int, now: float) -> float | None:
        """As a pace of `coordinator.promises`, whose places are tokens here."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else None


class SloAdmission:
    """Of one model."""

    def __init__(self, on_refused: OnRefused = lambda target: None) -> None:
        self._on_refused = on_refused
        self._promises: dict[str, Promises] = {}
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
        """Whether the targets are in reach. Where they are not, raises OverloadedError that says when they will be,
        unless the request shall run all the same. `request_id` is the client's own, or empty."""
        promises = self._of(tenant)
        kept = promises.num_kept(request_id, prediction, now, prediction.num_positions)
        is_newcomer = len(promises) > 0 and not promises.waits_for(request_id, now)
        part = NEWCOMERS_PART if is_newcomer else 1.0
        refusal = _too_late(targets, prediction, part, kept) or self._too_slow(targets, prediction, part)
        if refusal is None:
            promises.forget(request_id)
            return True
        if best_effort:
            return False
        delay_s = 0.0 if refusal.is_for_good else self._tell(promises, request_id, prediction, refusal, now)
        self._on_refused(refusal.target)
        when = "ask for a longer one" if refusal.is_for_good else f"try again in about {delay_s:.1f} s"
        raise OverloadedError(f"the request {refusal.why}; {when}, or as best effort", retry_after_s=delay_s)

    def _tell(
        self, promises: Promises, request_id: str, prediction: Prediction, refusal: _Refusal, now: float
    ) -> float:
        guess_s = prediction.forecast.prefill_s if prediction.forecast else 0.0
        return promises.tell(
            request_id,
            prediction.num_positions,
            prediction.num_tokens,
            prediction,
            guess_s,
            now,
            max(MIN_RETRY_AFTER_S, refusal.excess_s * MARGIN),
        )

    def _too_slow(self, targets: Targets, prediction: Prediction, part: float) -> _Refusal | None:
        """Answers end at an even pace: for a step to take less by a part, about that part of them has to."""
        limit_s, itl_s = targets.itl_s, prediction.itl_s
        if limit_s is None or itl_s <= limit_s * part:
            return None
        why = (
            f"would get a token every {_ms(itl_s)} on average, {_compared(itl_s, limit_s)} the {_ms(limit_s)} asked for"
        )
        if prediction.least_itl_s > limit_s:
            return _Refusal("itl", f"{why}, with nothing beside it", 0.0, is_for_good=True)
        return _Refusal("itl", why, (1 - limit_s * NEWCOMERS_PART / itl_s) * self._answer_s)

    def _of(self, tenant: str) -> Promises:
        """Of many tenants the one that is longest unheard of is forgotten."""
        promises = self._promises.pop(tenant, None) or Promises(LEAD_S)
        self._promises[tenant] = promises
        if len(self._promises) > _MAX_TENANTS:
            del self._promises[next(iter(self._promises))]
        return promises


@dataclass(frozen=True, slots=True)
class _Refusal:
    target: str
    why: str  # the predicate of a sentence
    excess_s: float  # until it is in reach if nothing else came
    is_for_good: bool = False


def _too_late(targets: Targets, prediction: Prediction, part: float, num_kept: int) -> _Refusal | None:
    """`num_kept` tokens are left to others, though to no more than half of what may wait: they may not come."""
    limit_s, ttft_s = targets.ttft_s, prediction.ttft_s
    if limit_s is None:
        return None
    kept_s = min(num_kept / prediction.tokens_per_s if prediction.tokens_per_s else 0.0, limit_s / 2)
    if ttft_s + kept_s <= limit_s * part:
        return None
    why = f"would get its first token in about {_s(ttft_s)}, {_compared(ttft_s, limit_s)} the {limit_s:g} s asked for"
    if prediction.least_ttft_s > limit_s:
        why += f", {_s(prediction.least_ttft_s)} of them without any wait"
        return _Refusal("ttft", why, 0.0, is_for_good=True)
    return _Refusal("ttft", why, ttft_s + kept_s - limit_s * NEWCOMERS_PART)


def _compared(predicted_s: float, limit_s: float) -> str:
    return "more than" if predicted_s > limit_s else "too near, with others told to come back before it, to"


def _s(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
