"""How much a node's scheduler takes on: plain data that is replaced as a whole, between two steps.

A node starts with what its settings say; the coordinator may send others at any time (`SetLimits` in the proto files).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import InvalidRequestError

MAX_BATCHED_TOKENS = 131_072
MAX_REQUESTS = 65_536
MAX_WEIGHT = 100.0  # of a node, beside which the weights of others are taken


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Of a decode node. `max_requests` bounds who holds blocks, the rest what one step does."""

    max_batch: int  # sequences of one step
    max_batched_tokens: int  # tokens of one step, those of prompts that are computed here included
    max_requests: int = 128  # requests that may hold blocks, or wait for them, at a time
    reserve_output_tokens: int = 0  # set aside for an answer when it is admitted; 0: for all of max_tokens

    def validate(self) -> None:
        """Raises InvalidRequestError, naming field, value and what is allowed."""
        _at_least("max_batch", self.max_batch, 1)
        _at_least("max_requests", self.max_requests, 1)
        _at_most("max_requests", self.max_requests, MAX_REQUESTS)
        _at_most("max_batched_tokens", self.max_batched_tokens, MAX_BATCHED_TOKENS)
        _at_least("reserve_output_tokens", self.reserve_output_tokens, 0)
        if self.max_batch > self.max_batched_tokens:
            raise InvalidRequestError(
                f"max_batch is {self.max_batch}; allowed is at most max_batched_tokens, {self.max_batched_tokens}: "
                "every sequence of the batch takes one token of a step"
            )

    def num_reserved(self, num_given: int, num_tokens: int) -> int:
        """Positions set aside at admission for a request of `num_given` tokens that may grow to `num_tokens`."""
        return min(num_tokens, num_given + self.reserve_output_tokens) if self.reserve_output_tokens else num_tokens


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Of a prefill node."""

    max_batched_tokens: int  # tokens of one step, all prompts together
    chunk_tokens: int  # tokens of one prompt in a step
    max_prefills: int  # prompts that load or compute at a time; short ones get as many places again
    max_waiting: int  # prompts that wait on the node

    def validate(self) -> None:
        """Raises InvalidRequestError, naming field, value and what is allowed."""
        _at_least("max_batched_tokens", self.max_batched_tokens, 1)
        _at_most("max_batched_tokens", self.max_batched_tokens, MAX_BATCHED_TOKENS)
        _at_least("chunk_tokens", self.chunk_tokens, 1)
        _at_least("max_prefills", self.max_prefills, 1)
        _at_most("max_prefills", self.max_prefills, MAX_REQUESTS)
        _at_least("max_waiting", self.max_waiting, 0)
        _at_most("max_waiting", self.max_waiting, MAX_REQUESTS)


@dataclass(frozen=True, slots=True)
class QueueMarks:
    """Waits of newcomers, in seconds, under which steps may be longer and above which they get shorter."""

    low_s: float = 0.03
    high_s: float = 0.1

    def validate(self) -> None:
        """Raises InvalidRequestError, naming values and what is allowed."""
        if not 0 < self.low_s < self.high_s:
            raise InvalidRequestError(
                f"queue_low_s is {self.low_s:g} and queue_high_s is {self.high_s:g}; allowed is "
                "0 < queue_low_s < queue_high_s"
            )


def check_weight(weight: float) -> None:
    """A node's part of the requests beside other nodes' weights, 0 for none. Raises InvalidRequestError."""
    if not 0 <= weight <= MAX_WEIGHT:
        raise InvalidRequestError(f"weight is {weight:g}; allowed is [0, {MAX_WEIGHT:g}]")


def _at_most(name: str, value: int, high: int) -> None:
    if value > high:
        raise InvalidRequestError(f"{name} is {value}; allowed is at most {high}")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidRequestError(f"{name} is {value}; allowed is at least {low}")
