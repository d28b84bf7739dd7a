"""What each tenant is entitled to: its share of the cluster, and how much of it may wait. Pure.

Written in one line, as in `--tenants "search:weight=3,max_queued=64;batch:priority=-50;*:max_queued_tokens=200000"`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.prompt_limits import PromptLimits
from kvrelay.errors import ConfigError, InvalidRequestError
from kvrelay.inference import check_priority
from kvrelay.types import MAX_TENANT_CHARS, check_tenant_name

EVERYONE_ELSE = "*"
OF_MODEL = "max_prompt_tokens@"  # followed by a model's name
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


_BOUNDS = ("max_queued", "max_queued_tokens", "max_wait_s", "max_prompt_tokens", "daily_tokens", "max_open")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """0 in a bound leaves it to what holds for all tenants together. Raises ConfigError for what is out of range."""

    weight: float = 1.0  # of its share of tokens while others wait too
    max_queued: int = 0  # answers that wait at a time
    max_queued_tokens: int = 0  # that they want in all
    max_wait_s: float = 0.0  # of one answer for room
    priority: int = 0  # of requests that name none; compared only within the tenant
    ttft_s: float = 0.0  # target of requests that name none, until the first token; 0: none
    itl_s: float = 0.0  # the same, between two tokens
    max_prompt_tokens: int = 0
    daily_tokens: int = 0  # of prompts and answers, each day of UTC; 0: no budget
    max_open: int = 0  # answers that wait or are computed at a time
    prompt_tokens_by_model: Mapping[str, int] = field(default_factory=dict)  # instead of max_prompt_tokens

    def __post_init__(self) -> None:
        if not MIN_WEIGHT <= self.weight <= MAX_WEIGHT:
            raise ConfigError(f"weight is {self.weight:g}; allowed is {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        bounds = {name: getattr(self, name) for name in _BOUNDS}
        bounds |= {OF_MODEL + model: value for model, value in self.prompt_tokens_by_model.items()}
        for name, value in bounds.items():
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value:g}; allowed is at least 0, where 0 sets no bound")
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value:g}; allowed is at least 0, where 0 sets no target")
        try:
            check_priority(self.priority)
        except InvalidRequestError as error:
            raise ConfigError(error.message) from error

    @property
    def prompt_limits(self) -> PromptLimits:
        return PromptLimits(self.max_prompt_tokens, self.prompt_tokens_by_model)


_KINDS: dict[str, type[int] | type[float]] = {
    name: type(value) for name, value in dataclasses.asdict(TenantPolicy()).items() if name != "prompt_tokens_by_model"
}
# Names, of tenants and of models, may have colons.
_BEFORE_TERMS = re.compile(rf":(?=\s*(?:(?:{'|'.join(_KINDS)})\s*=|{OF_MODEL}))")


class TenantPolicies:
    """Policies by name; for each tenant that is not named, those of EVERYONE_ELSE."""

    def __init__(self, named: Mapping[str, TenantPolicy] | None = None) -> None:
        given = dict(named or {})
        self._otherwise = given.pop(EVERYONE_ELSE, TenantPolicy())
        self._named = given

    def of(self, tenant: str) -> TenantPolicy:
        return self._named.get(tenant, self._otherwise)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tenants that are named, without EVERYONE_ELSE."""
        return tuple(self._named)

    def check_within(self, max_places: int, max_wait_s: float) -> None:
        """Raises ConfigError for a tenant's bound that the one for all together would make meaningless."""
        for name, policy in {**self._named, EVERYONE_ELSE: self._otherwise}.items():
            for term, own, flag, most in (
                ("max_queued", policy.max_queued, "max_queue", max_places),
                ("max_wait_s", policy.max_wait_s, "max_queue_wait_s", max_wait_s),
            ):
                if own > most:
                    raise ConfigError(f"tenants has {name!r}: {term} is {own:g}, over the {most:g} of {flag} for all")

    def check_models(self, served: Collection[str]) -> None:
        """Raises ConfigError where a tenant has terms for a model that is none of those served."""
        for name, policy in {**self._named, EVERYONE_ELSE: self._otherwise}.items():
            try:
                policy.prompt_limits.check_models(served)
            except ConfigError as error:
                raise ConfigError(f"tenants has {name!r}: {OF_MODEL[:-1]}: {error.message}") from error

    def weight(self, tenant: str) -> float:
        return self.of(tenant).weight

    def parts(self, num_places: int) -> dict[str, int]:
        """Of so many places each named tenant's part by weight, rounded down. Those that are not named have one between
        them, which is what these leave."""
        weights = {name: policy.weight for name, policy in self._named.items()}
        total = sum(weights.values()) + self._otherwise.weight
        return {name: int(num_places * weight / total) for name, weight in weights.items()}


def parse_policies(text: str) -> TenantPolicies:
    """Of `NAME:KEY=VALUE,...` entries with semicolons or line breaks between. Raises ConfigError that says where."""
    named: dict[str, TenantPolicy] = {}
    for entry in filter(None, (part.strip() for part in re.split(r"[;\n]", text))):
        name, policy = _parse_entry(entry)
        if name in named:
            raise ConfigError(f"tenants has {name!r} twice; write what holds for it in one entry")
        named[name] = policy
    return TenantPolicies(named)


def _parse_entry(entry: str) -> tuple[str, TenantPolicy]:
    name, colon, terms = _split(entry)
    try:
        if not colon:
            raise ConfigError("a name, a colon and terms are needed, such as search:weight=3,max_queued=64")
        check_tenant_name(name)
        given: dict[str, Any] = {}
        for key, value in map(_parse_term, filter(str.strip, terms.split(","))):
            if key in given:
                raise ConfigError(f"{key} is given twice")
            given[key] = value
        by_model = {key.removeprefix(OF_MODEL): given.pop(key) for key in [*given] if key.startswith(OF_MODEL)}
        return name, TenantPolicy(**given, prompt_tokens_by_model=by_model)
    except (ConfigError, InvalidRequestError) as error:
        raise ConfigError(f"tenants has {entry[: 2 * MAX_TENANT_CHARS]!r}: {error.message}") from error


def _split(entry: str) -> tuple[str, str, str]:
    """Name, colon and terms; without the last two where there is no colon."""
    found = _BEFORE_TERMS.search(entry)
    at = found.start() if found else entry.rfind(":")
    return entry[: max(at, 0)].strip(), ":" if at >= 0 else "", entry[at + 1 :]


def _parse_term(term: str) -> tuple[str, int | float]:
    key, _, value = (part.strip() for part in term.partition("="))
    kind = int if key.startswith(OF_MODEL) else _KINDS.get(key)
    if kind is None:
        raise ConfigError(f"{key!r} is no term of a tenant; allowed are {', '.join(_KINDS)}, {OF_MODEL}MODEL")
    try:
        return key, kind(value)
    except ValueError as error:
        allowed = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{key} is {value!r}; allowed is {allowed}") from error
