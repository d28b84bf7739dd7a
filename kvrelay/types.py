"""Plain data that more than one room speaks of: ids, sampling parameters, accounts, node status.

Nothing here knows protobuf or torch; `kvrelay.rpc.convert` maps to and from the wire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from kvrelay.errors import InvalidRequestError

RequestId = NewType("RequestId", str)
ReservationId = NewType("ReservationId", str)
InstanceId = NewType("InstanceId", str)  # new at every start of a process
BlockId = NewType("BlockId", int)  # index into a node's pool
BlockHash = NewType("BlockHash", bytes)  # 32 bytes; see kvrelay.kv.hashing

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20


class Role(Enum):
    COORDINATOR = "coordinator"
    PREFILL_NODE = "prefill-node"
    DECODE_NODE = "decode-node"
    KVSTORE = "kvstore"


class Tier(Enum):
    """Where a block was found."""

    DEVICE = "device"
    MEMORY = "memory"
    DISK = "disk"
    NONE = "none"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when the answer ends. Defaults are the field's.

    A draw depends on (seed, position) only. `seed` and `max_tokens` are None until the coordinator settles them.
    `logprobs` None asks for none; k asks for the drawn token's and the k likeliest.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequestError, naming field, value and what is allowed."""
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_count("top_k", self.top_k, 0)
        _check_count("min_tokens", self.min_tokens, 0)
        if self.seed is not None:
            _check_count("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}")
        if self.logprobs is not None:
            _check_count("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._validate_stops(vocab_size)
        self._validate_bias(vocab_size)

    def _validate_stops(self, vocab_size: int) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop has {len(self.stop)} entries; at most {MAX_STOP_STRINGS} are allowed")
        for text in self.stop:
            if not text:
                raise InvalidRequestError("stop holds an empty string; remove it or send no stop at all")
            if len(text) > MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARS} are allowed"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token_id in self.stop_token_ids:
            check_token_id("stop_token_ids", token_id, vocab_size)

    def _validate_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed"
            )
        for token_id, bias in self.logit_bias.items():
            check_token_id("logit_bias", token_id, vocab_size)
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def check_token_id(name: str, token_id: int, vocab_size: int) -> None:
    """Raises InvalidRequestError unless 0 <= token_id < vocab_size."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(f"{name} holds {token_id}; token ids are in [0, {vocab_size})")


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    if math.isnan(value) or not (low < value <= high if low_open else low <= value <= high):
        raise InvalidRequestError(f"{name} is {value}; allowed is {'(' if low_open else '['}{low:g}, {high:g}]")


def _check_count(name: str, value: int, low: int, high: int = 2**32 - 1) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} is {value}; allowed is [{low}, {high}]")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float  # natural logarithm, of the model's own distribution, before temperature


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # likeliest first


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token of an answer."""

    token_id: int
    logprobs: StepLogprobs | None = None


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens that were not computed again, by the tier they were found in."""

    device: int = 0
    memory: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.memory + self.disk


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request as nodes see it: ids only.

    `token_ids` are the prompt, followed by earlier output when the request is resumed elsewhere.
    `sampling` has seed and max_tokens set; stop strings are the coordinator's affair.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    tenant_salt: bytes = b""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of a pool by state; the four add up to total."""

    total: int = 0
    free: int = 0
    reserved: int = 0
    held: int = 0
    cached: int = 0

    @property
    def available(self) -> int:
        """Blocks a new request could get: free ones and cached ones, which are evicted."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True)
class NodeStatus:
    ready: bool = False
    draining: bool = False
    blocks: BlockCounts = BlockCounts()
    num_running: int = 0
    num_waiting: int = 0
    num_slots_free: int = 0
    num_reservations: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0


# What crosses between coordinator, prefill and decode nodes, one class per message of proto/kvrelay/pb.


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
class TokensDecoded:
    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """`cached` and `compute_s` are set only when the decode node computed the prompt's tail itself."""

    reason: FinishReason
    cached: CachedTokens = CachedTokens()
    compute_s: float = 0.0


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


# What crosses between a client and the coordinator.


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Tokenized as it stands, special tokens recognised, no template."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Used as it stands."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Rendered by the model's chat template, then tokenized."""

    messages: tuple[ChatMessage, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """As a client sends it. `request_id` empty: the coordinator chooses; `model` empty: the only one served."""

    prompt: Prompt | None
    sampling: SamplingParams = SamplingParams()
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request consumed, counted once, also after retries."""

    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens = CachedTokens()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds by the coordinator's clock, from acceptance where they name a moment."""

    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    prefill_s: float = 0.0
    handoff_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    request_id: RequestId
    prompt_tokens: int
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """More of an answer; `text` may lag behind the tokens."""

    tokens: tuple[GeneratedToken, ...]
    text: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """`prefill_node` and `decode_node` are the addresses that computed the answer; empty where none was needed."""

    reason: FinishReason
    usage: Usage
    timing: Timing
    prefill_node: str = ""
    decode_node: str = ""
    handoff_bytes: int = 0
    stop_string: str = ""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The terminal event of an accepted request that got no complete answer; fields as of kvrelay.errors."""

    code: str
    message: str
    retryable: bool
    retry_after_s: float = 0.0


GenerateEvent = RequestAccepted | TokensGenerated | RequestFinished | RequestFailed
