"""One request in the simulation: what is asked, what becomes of it, and its state on the nodes, counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from bench.sim.load import Arrival
from coordinator.calibration import PlacedForecast
from coordinator.queue import Ticket
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockHash, BlockId, InstanceId, RequestId


class Outcome(Enum):
    FINISHED = "finished"
    OUT_OF_REACH = "out of reach"  # its targets, it was told at the door
    TURNED_AWAY = "turned away"  # before it waited
    GAVE_UP = "gave up"  # found no room within the time that one may wait


NOT_LET_IN = (Outcome.OUT_OF_REACH, Outcome.TURNED_AWAY)


@dataclass(frozen=True, slots=True)
class Given:
    """Of a node's request, what bookkeeping of blocks reads."""

    sampling: SamplingParams


@dataclass(slots=True, eq=False)
class CountedSequence:
    """Stands for kvrelay.engine.sequence.Sequence in schedulers and block memory: counts where that has token ids.

    `block_hashes` goes on to the end of the answer, beyond what is drawn; no more is read than `num_tokens` cover."""

    request: Given
    block_tokens: int
    block_hashes: list[BlockHash]
    num_prompt_tokens: int
    num_tokens: int
    block_table: list[BlockId] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_registered_blocks: int = 0
    itl_target_s: float = 0.0

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_reusable_blocks(self) -> int:
        return (self.num_tokens - 1) // self.block_tokens

    def unregistered_blocks(self) -> list[tuple[BlockId, BlockHash]]:
        span = slice(self.num_registered_blocks, self.num_computed_tokens // self.block_tokens)
        return list(zip(self.block_table[span], self.block_hashes[span], strict=False))


@dataclass(slots=True, eq=False)
class SimRequest:
    """Belongs to the coordinator; nodes note on it what they did. Times are of the virtual clock."""

    request_id: RequestId
    arrival: Arrival
    block_tokens: int
    hashes: list[BlockHash]  # of all full blocks, to the answer's end
    num_charged: int = 0  # tokens, to its tenant when it was let in
    ticket: Ticket | None = None
    told_s: float | None = None  # when to come back, the last time it was turned away
    num_returns: int = 0
    prefill_node: InstanceId | None = None
    decode_node: InstanceId | None = None
    is_tail: bool = False
    num_cached_prefill: int = 0  # prompt tokens found where it was computed
    num_cached_decode: int = 0
    num_preemptions: int = 0
    placed_forecast: PlacedForecast | None = None  # when it was placed
    predicted_s: float | None = None  # until the first token, when it was let in
    entered_at: float = 0.0
    granted_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None

    @property
    def prompt_hashes(self) -> list[BlockHash]:
        return self.hashes[: self.arrival.num_prompt // self.block_tokens]

    @property
    def ttft_s(self) -> float | None:
        """From when the coordinator let it in: who is turned away waits elsewhere."""
        return None if self.first_token_at is None else self.first_token_at - self.entered_at

    @property
    def itl_s(self) -> float:
        """Mean time between tokens, of an answer that is finished; 0 for one of a single token."""
        if self.ended_at is None or self.first_token_at is None or self.arrival.num_output == 1:
            return 0.0
        return (self.ended_at - self.first_token_at) / (self.arrival.num_output - 1)

    def sequence(self) -> CountedSequence:
        """As a node has it when it is asked."""
        arrival = self.arrival
        given = Given(SamplingParams(seed=0, max_tokens=arrival.max_tokens))
        return CountedSequence(given, self.block_tokens, self.hashes, arrival.num_prompt, arrival.num_prompt)
