"""What crosses between coordinator, prefill and decode nodes, a class a message of prefill.proto and decode.proto."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import KVRelayError
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import (
    DEFAULT_TENANT,
    AnswerHandle,
    CachedTokens,
    FinishReason,
    InstanceId,
    RequestId,
    ReservationId,
)


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request as nodes see it: ids only.

    `token_ids` are the prompt, followed by earlier output when the request is resumed elsewhere.
    `sampling` has seed and max_tokens set; stop strings are the coordinator's affair. `tenant_salt` names the blocks;
    `tenant` is whose quota of a kvstore they use there, for `cache_ttl_s` after their last use (None: as for all of the
    tenant's; 0: no end).
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant_salt: bytes = b""
    tenant: str = DEFAULT_TENANT
    cache_ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReservationGranted:
    """A decode node set blocks aside; `num_cached_blocks` leading ones already hold the right KV and are pinned."""

    reservation_id: ReservationId
    instance_id: InstanceId
    num_cached_blocks: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class HandoffTarget:
    """Where a prefill node streams KV; frames of an older attempt or for another instance are refused."""

    address: str
    instance_id: InstanceId
    reservation_id: ReservationId
    attempt: int
    first_block: int


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    cached: CachedTokens


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The first token is known and, if there was a target, the decode node committed."""

    first_token: GeneratedToken
    cached: CachedTokens
    compute_s: float
    handoff_s: float
    handoff_bytes: int


@dataclass(frozen=True, slots=True)
class AnswerWanted:
    """A reservation's answer is to be read under `handle`, for `timeout_s` at most (0: without end)."""

    handle: AnswerHandle
    reservation_id: ReservationId
    compute_tail: bool = False
    timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswersAsked:
    """Answers that one caller wants to read from now on, and those it does not want to read any more."""

    wanted: tuple[AnswerWanted, ...] = ()
    left: tuple[AnswerHandle, ...] = ()


@dataclass(frozen=True, slots=True)
class TokensDecoded:
    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """`cached` and `compute_s` are set only when the decode node computed the prompt's tail itself."""

    reason: FinishReason
    cached: CachedTokens = CachedTokens()
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AnswersAdvanced:
    """What came of one caller's answers. The tokens of one are in order, and its end, or why there will be none, comes
    after them."""

    tokens: tuple[tuple[AnswerHandle, tuple[GeneratedToken, ...]], ...] = ()
    ended: tuple[tuple[AnswerHandle, DecodeFinished | KVRelayError], ...] = ()


@dataclass(frozen=True, slots=True)
class HandoffBegin:
    reservation_id: ReservationId
    instance_id: InstanceId
    attempt: int
    model_fingerprint: str
    layout_fingerprint: str
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class HandoffEnd:
    num_blocks: int
    checksum: bytes
    first_token: GeneratedToken


@dataclass(frozen=True, slots=True)
class BlocksReceived:
    num_blocks: int
    committed: bool
