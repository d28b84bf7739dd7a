"""Why a request waited, where it went and what it cost: of what runs, and of what ended lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.flow import Flow
from coordinator.lifetime import Stage
from coordinator.request import RequestState
from kvrelay.explanation import Explanation, ForecastOutcome
from kvrelay.inference import RequestFailed, RequestFinished, Usage
from kvrelay.types import RequestId

MAX_ENDED = 1_000
ENDED_S = 600.0
_WAITING = (None, Stage.QUEUED, Stage.RESERVING)


class EndedRequests:
    """The last ones that ended, for a while. Told the time in seconds."""

    def __init__(self, max_ended: int = MAX_ENDED, keep_s: float = ENDED_S) -> None:
        self._max_ended = max_ended
        self._keep_s = keep_s
        self._ended: OrderedDict[tuple[str, RequestId], tuple[float, Explanation]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, explanation: Explanation, now: float) -> None:
        """One of the same tenant under the same id takes the place of an older one."""
        key = explanation.tenant, explanation.request_id
        self._ended.pop(key, None)
        self._ended[key] = now, explanation
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        self._drop_old(now)

    def find(self, request_id: RequestId, tenant: str, now: float) -> Explanation | None:
        self._drop_old(now)
        _, explanation = self._ended.get((tenant, request_id), (now, None))
        return explanation

    def _drop_old(self, now: float) -> None:
        while self._ended:
            at, _ = next(iter(self._ended.values()))
            if at > now - self._keep_s:
                return
            self._ended.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Life:
    """What there is to tell of a request. Moments are readings of time.monotonic."""

    flows: Sequence[Flow]
    model: str  # by the name that clients use
    end: RequestFinished | RequestFailed | None
    last_token_at: float | None  # of answer 0

    def explain(self, now: float) -> Explanation:
        first = self.flows[0].state
        states = [flow.state for flow in self.flows]
        account, finished = first.account, self.end if isinstance(self.end, RequestFinished) else None
        timing = first.timing(now)
        completion_tokens = sum(len(state.answer.token_ids) for state in states)
        return Explanation(
            request_id=first.request_id,
            tenant=first.accepted.tenant,
            model=self.model,
            state=self._state(),
            usage=finished.usage if finished else Usage(first.num_prompt_tokens, completion_tokens, account.cached),
            timing=finished.timing if finished else timing,
            steps=first.steps.kept(),
            error=self.end if isinstance(self.end, RequestFailed) else None,
            prefill_node=account.prefill_node,
            decode_node=account.decode_node,
            computed_on_decode=account.computed_on_decode,
            num_blocks=_num_blocks(first),
            handoff_bytes=sum(state.account.handoff_bytes for state in states),
            retries=sum(state.account.num_retries for state in states),
            forecast=self._forecast(first),
            considered=tuple(str(pair) for pair in first.considered),
        )

    def _state(self) -> str:
        if isinstance(self.end, RequestFinished):
            return "finished"
        if self.end is not None:
            return "cancelled" if self.end.code == "cancelled" else "failed"
        return "waiting" if all(flow.lifetime.stage in _WAITING for flow in self.flows) else "running"

    def _forecast(self, first: RequestState) -> ForecastOutcome:
        account, num_gaps, itl_s = first.account, len(first.answer.token_ids) - 1, 0.0
        if self.last_token_at is not None and account.first_token_at is not None and num_gaps > 0:
            itl_s = (self.last_token_at - account.first_token_at) / num_gaps
        ttft_s = 0.0 if account.first_token_at is None else account.first_token_at - account.accepted_at
        placed = first.placed_forecast
        if placed is None:
            return ForecastOutcome(0.0, ttft_s, 0.0, itl_s)
        waited_s = placed.at - account.accepted_at
        is_later = account.first_token_at is not None and placed.at > account.first_token_at  # that of a resume
        return ForecastOutcome(0.0 if is_later else waited_s + placed.ttft_s, ttft_s, placed.itl_s, itl_s)


def _num_blocks(state: RequestState) -> int:
    """It may have grown beyond what was set aside."""
    if not state.account.decode_node:
        return 0
    return max(state.account.num_blocks, state.accepted.model.layout.blocks_for(len(state.token_ids)))
