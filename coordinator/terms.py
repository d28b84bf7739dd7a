"""What holds for each tenant's requests beside its share of the cluster: targets, the day's tokens, the longest prompt,
how much of an answer is set aside. Puts together `slo`, `budgets` and `output_lengths`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from coordinator.budgets import DailyBudgets
from coordinator.config import CoordinatorConfig
from coordinator.flow import Flow
from coordinator.output_lengths import OutputLengths
from coordinator.policy_metrics import PolicyMetrics
from coordinator.prompt_limits import check_prompt
from coordinator.request import AcceptedRequest
from coordinator.slo import NO_TARGETS, SloAdmission, targets_of
from coordinator.tally import Tally
from coordinator.tenant_policy import TenantPolicies
from kvrelay.inference import MIN_PRIORITY, GenerateRequest


class Terms:
    """Belongs to the event loop. `clock` gives seconds since 1970."""

    def __init__(
        self,
        config: CoordinatorConfig,
        policies: TenantPolicies,
        metrics: PolicyMetrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._policies = policies
        self._metrics = metrics
        self._prompt_limits = config.prompt_limits()
        self._budgets = DailyBudgets(policies, clock, metrics)
        self._lengths = defaultdict[str, OutputLengths](partial(OutputLengths, config.reserve_quantile))  # by model
        self._reserves_expected = config.reserve == "expected"
        self._slo = defaultdict[str, SloAdmission](partial(SloAdmission, metrics.refused, policies.weight))  # by model

    def check(self, request: GenerateRequest, tenant: str) -> None:
        """Raises InvalidRequestError for targets that make no sense, BudgetSpentError."""
        request.check_targets()
        self._budgets.check(tenant)

    def spend(self, tenant: str, num_tokens: int) -> None:
        """Of an answer that was not computed anew."""
        self._budgets.spend(tenant, num_tokens)

    def settle(self, accepted: AcceptedRequest, request: GenerateRequest) -> AcceptedRequest:
        """With what the request leaves to its tenant's policy. Raises PromptTooLongError."""
        policy = self._policies.of(accepted.tenant)
        num_tokens, model = len(accepted.prompt_ids), accepted.model.name
        check_prompt(num_tokens, model, accepted.tenant, policy.prompt_limits, self._prompt_limits)
        lengths, most = self._lengths[model], accepted.sampling.max_tokens or 0
        return replace(
            accepted,
            priority=policy.priority if request.priority is None else request.priority,
            targets=targets_of(request, policy),
            best_effort=request.best_effort,
            expected_tokens=lengths.expected(accepted.tenant, most) if self._reserves_expected else 0,
        )

    def admit(self, flows: Sequence[Flow], client_id: str, now: float) -> None:
        """Raises OverloadedError for a request whose targets are out of reach. One that runs all the same, or names
        none and runs as best effort, lets its tenant's others pass. `client_id` is the id the client chose, if any."""
        accepted = flows[0].state.accepted
        in_reach = not accepted.best_effort
        if accepted.targets.are_set:
            one = flows[0].predict()
            num_more = (len(flows) - 1) * (accepted.sampling.max_tokens or 0)
            prediction = replace(one, num_tokens=one.num_tokens + num_more, num_positions=one.num_positions + num_more)
            in_reach = self._slo[accepted.model.name].check(
                accepted.tenant, client_id, accepted.targets, prediction, now, best_effort=accepted.best_effort
            )
        if not in_reach:
            for flow in flows:
                flow.state.accepted = replace(flow.state.accepted, priority=MIN_PRIORITY, targets=NO_TARGETS)

    def tally(self, accepted: AcceptedRequest) -> Tally:
        """For a request that was admitted."""

        def on_answer(num_tokens: int, seconds: float) -> None:
            self._lengths[accepted.model.name].note(accepted.tenant, num_tokens)
            self._slo[accepted.model.name].note_answer(seconds)

        return Tally(
            accepted.targets,
            len(accepted.prompt_ids),
            self._metrics.judged,
            partial(self._budgets.spend, accepted.tenant),
            on_answer,
        )
