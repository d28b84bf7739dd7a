"""What one request is, has so far and has cost: the state that outlives any single attempt to compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.answer import Answer
from coordinator.calibration import PlacedForecast
from coordinator.circuits import Party
from coordinator.members import Member
from coordinator.pair import Pair
from coordinator.slo import NO_TARGETS, Targets
from coordinator.steps import Steps
from coordinator.tenants import CacheScope
from kvrelay.cluster import ModelInfo
from kvrelay.errors import CancelledError, KVRelayError, NotFoundError
from kvrelay.inference import RequestFinished, Timing, Usage
from kvrelay.kv.hashing import block_hashes, chain_root
from kvrelay.messages import NodeRequest, PrefillFinished
from kvrelay.sampling import SamplingParams
from kvrelay.types import BlockHash, CachedTokens, RequestId

GROWTH_TOKENS = 16  # set aside at least, beyond what there is of the answer, however short it is expected to be


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that passed validation: everything about it is settled."""

    request_id: RequestId
    node_request_id: RequestId  # what nodes know it by; unique among everything they run
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    model: ModelInfo
    scope: CacheScope
    priority: int = 0  # among its tenant's requests
    targets: Targets = NO_TARGETS
    best_effort: bool = False
    expected_tokens: int = 0  # of the answer, to set aside at first; 0: as many as decode nodes do by their own limits

    @property
    def tenant(self) -> str:
        return self.scope.tenant


@dataclass(slots=True)
class Account:
    """What the end of the request reports; a retry replaces what the failed attempt noted, never adds to it.

    Moments are readings of time.monotonic: an event loop's own clock may tick in milliseconds.
    """

    accepted_at: float
    granted_at: float | None = None
    first_token_at: float | None = None
    cached: CachedTokens = field(default_factory=CachedTokens)
    prefill_s: float = 0.0
    handoff_s: float = 0.0
    handoff_bytes: int = 0
    prefill_node: str = ""
    decode_node: str = ""
    num_blocks: int = 0  # set aside there when it was placed
    computed_on_decode: bool = False
    num_retries: int = 0


class RequestState:
    """`avoid` are the nodes, and the links between two, that failed it; they are asked last."""

    def __init__(self, accepted: AcceptedRequest, answer: Answer, now: float) -> None:
        self.accepted = accepted
        self.answer = answer
        self.account = Account(now)
        self.avoid: set[Party] = set()
        self.steps = Steps(accepted.request_id, now)
        self.considered: Sequence[Pair] = ()  # when it was last tried to place it, best first
        self.placed_forecast: PlacedForecast | None = None  # of the last placement; None where nothing was measured
        self._num_tokens_before = 0  # of the answer, when the attempt began
        model = accepted.model
        self._root = chain_root(model.fingerprint, model.layout.fingerprint, accepted.scope.salt)
        self._hashes: list[BlockHash] = []

    @property
    def request_id(self) -> RequestId:
        return self.accepted.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.accepted.prompt_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt and the answer so far: what the next attempt starts from."""
        return (*self.accepted.prompt_ids, *self.answer.token_ids)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the answer so far."""
        return len(self.accepted.prompt_ids) + len(self.answer.token_ids)

    @property
    def num_positions(self) -> int:
        """Of prompt and whole answer: what a decode node reserves for. The same in every attempt."""
        return self.num_tokens + self.answer.num_left

    @property
    def num_positions_now(self) -> int:
        """Of those, what is set aside when a node admits it: some more than there are; 0 leaves it to the node."""
        if not self.accepted.expected_tokens:
            return 0
        num_answer = len(self.answer.token_ids)
        num_expected = max(self.accepted.expected_tokens, num_answer + GROWTH_TOKENS)
        return min(len(self.accepted.prompt_ids) + num_expected, self.num_positions)

    @property
    def has_begun(self) -> bool:
        """Whether this attempt gave a token."""
        return len(self.answer.token_ids) > self._num_tokens_before

    def avoids(self, prefill: Member, decode: Member | None) -> bool:
        """Whether the prefill node, or its link to the decode node, failed this request."""
        party = (prefill.info.instance_id,)
        return party in self.avoid or (decode is not None and (*party, decode.info.instance_id) in self.avoid)

    def begin_attempt(self) -> None:
        self._num_tokens_before = len(self.answer.token_ids)
        if not self.answer.token_ids:  # what an earlier attempt cost is no part of this answer
            self.account = Account(
                self.account.accepted_at, self.account.granted_at, num_retries=self.account.num_retries
            )

    def hashes(self) -> list[BlockHash]:
        """Of the full blocks so far, as the nodes will hash them. Each is computed once."""
        block_tokens = self.accepted.model.layout.block_tokens
        parent = self._hashes[-1] if self._hashes else self._root
        rest = self.token_ids[len(self._hashes) * block_tokens :]
        self._hashes += block_hashes(parent, rest, block_tokens)
        return list(self._hashes)

    def prefix_hash(self) -> bytes:
        """Of the prompt's last full block; empty when it has none."""
        num_full = len(self.accepted.prompt_ids) // self.accepted.model.layout.block_tokens
        return self.hashes()[num_full - 1] if num_full else b""

    def node_request(self) -> NodeRequest:
        return NodeRequest(
            request_id=self.accepted.node_request_id,
            token_ids=self.token_ids,
            num_prompt_tokens=len(self.accepted.prompt_ids),
            sampling=replace(self.accepted.sampling, stop=()),
            tenant_salt=self.accepted.scope.salt,
            tenant=self.accepted.scope.tenant,
            cache_ttl_s=self.accepted.scope.ttl_s,
        )

    def note_cached(self, cached: CachedTokens) -> None:
        """Cached prompt tokens, of the attempt that gives the first token: a resumed answer's were computed once."""
        if self._num_tokens_before == 0:
            self.account.cached = capped(cached, len(self.accepted.prompt_ids))

    def note_started(self, address: str, cached: CachedTokens) -> None:
        """A prefill node is at work; what it says at its end may be lost."""
        self.note_cached(cached)
        self.account.prefill_node = address

    def note_prefill(self, address: str, finished: PrefillFinished) -> None:
        self.note_started(address, finished.cached)
        self.account.prefill_s = finished.compute_s
        self.account.handoff_s = finished.handoff_s
        self.account.handoff_bytes = finished.handoff_bytes

    def timing(self, now: float) -> Timing:
        """So far."""
        account = self.account
        return Timing(
            queue_s=(account.granted_at or now) - account.accepted_at,
            first_token_s=(account.first_token_at or account.accepted_at) - account.accepted_at,
            total_s=now - account.accepted_at,
            prefill_s=account.prefill_s,
            handoff_s=account.handoff_s,
        )

    def finished(self, now: float) -> RequestFinished:
        """The account of a complete answer."""
        account, answer = self.account, self.answer
        assert answer.reason is not None
        return RequestFinished(
            reason=answer.reason,
            usage=Usage(len(self.accepted.prompt_ids), len(answer.token_ids), account.cached),
            timing=self.timing(now),
            prefill_node=account.prefill_node,
            decode_node=account.decode_node,
            handoff_bytes=account.handoff_bytes,
            stop_string=answer.stop_string,
            retries=account.num_retries,
            prefix_hash=self.prefix_hash(),
        )


def may_succeed_elsewhere(error: KVRelayError) -> bool:
    """Whether another node, or the same one later, may do what this one did not. A node that shuts down cancels what
    it runs, and a reservation that lapsed is not found."""
    return error.retryable or isinstance(error, CancelledError | NotFoundError)


def capped(cached: CachedTokens, most: int) -> CachedTokens:
    """At most `most` tokens in all, the fastest tiers counted first."""
    device = min(cached.device, most)
    memory = min(cached.memory, most - device)
    return CachedTokens(device, memory, min(cached.disk, most - device - memory))
