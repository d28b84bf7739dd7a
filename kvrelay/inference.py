"""What crosses between a client and the coordinator, one class per message of inference.proto."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from kvrelay.errors import InvalidRequestError
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import CachedTokens, FinishReason, RequestId

MAX_CHOICES = 128  # answers to one prompt, as in OpenAI's API
MIN_PRIORITY, MAX_PRIORITY = -100, 100
MAX_KEEP_S = 600.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the assistant asked to be done in an earlier turn; `arguments` is the JSON text of an object."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is "system", "developer", "user", "assistant" or "tool".

    `tool_calls` are an assistant's, `tool_call_id` says which of them a tool's turn answers, `name` who speaks.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ChatEnd(Enum):
    """What a rendered conversation ends in, and the model goes on with."""

    ANSWER = "answer"  # the beginning of an assistant's turn
    LAST_MESSAGE = "last_message"  # the last turn, left open
    NOTHING = "nothing"  # the last turn, closed


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Tokenized as it stands, special tokens recognised, no template.

    `add_bos` False: also where the model expects a BOS token before a text, none is put there.
    """

    text: str
    add_bos: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Used as it stands."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Rendered by the model's chat template, then tokenized.

    `tools` is the JSON text of an array, as OpenAI's API writes what may be called; `template_kwargs` that of an object
    with more names for the template. Empty: none.
    """

    messages: tuple[ChatMessage, ...]
    tools: str = ""
    template_kwargs: str = ""
    end: ChatEnd = ChatEnd.ANSWER


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """As a client sends it. `request_id` empty: the coordinator chooses; `model` empty: the only one served.

    `n` answers are asked for; answer i draws with fork_seed(seed, i).

    Cached KV is shared within the tenant, by requests of the same `cache_salt` (None: no salt); with every tenant if
    `public_cache` names where. `cache_ttl_s` is how long a kvstore keeps the prompt's blocks after their last use: None
    for the tenant's own time, 0 for no end.
    """

    prompt: Prompt | None
    sampling: SamplingParams = SamplingParams()
    request_id: str = ""
    model: str = ""
    n: int = 1
    cache_salt: str | None = None
    public_cache: str = ""
    cache_ttl_s: float | None = None
    priority: int | None = None  # among the tenant's own requests; None: the tenant's usual one
    ttft_target_s: float | None = None  # None: the tenant's, or none
    itl_target_s: float | None = None  # between two tokens, as ttft_target_s
    best_effort: bool = False  # run it also where its targets are out of reach
    keep_s: float = 0.0  # how long it outlives its call, and its answer its end

    def check_priority(self) -> None:
        """Raises InvalidRequestError."""
        if self.priority is not None:
            check_priority(self.priority)

    def check_targets(self) -> None:
        """Raises InvalidRequestError, naming value and what is allowed."""
        for name in ("ttft_target_s", "itl_target_s"):
            target_s: float | None = getattr(self, name)
            if target_s is not None and not 0 < target_s < math.inf:
                raise InvalidRequestError(f"{name} is {target_s:g}; allowed is a number of seconds over 0")

    def check_keep(self) -> None:
        """Raises InvalidRequestError, naming value and what is allowed."""
        if not 0 <= self.keep_s <= MAX_KEEP_S:
            raise InvalidRequestError(f"keep_s is {self.keep_s:g}; allowed is [0, {MAX_KEEP_S:g}] seconds")
        if self.keep_s and not self.request_id:
            raise InvalidRequestError(
                f"keep_s is {self.keep_s:g}, but the request has no request_id to find its answer by; choose one"
            )

    def check_n(self) -> None:
        """Raises InvalidRequestError, naming value and what is allowed."""
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequestError(f"n is {self.n}; allowed is [1, {MAX_CHOICES}]")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request consumed, counted once, also after retries; `completion_tokens` of all its answers."""

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
    """More of answer `index`; `text` may lag behind the tokens. Events of different answers come in any order."""

    tokens: tuple[GeneratedToken, ...]
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One of several answers is complete; where one was asked for, RequestFinished alone says so."""

    index: int
    reason: FinishReason
    stop_string: str
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """`prefill_node` and `decode_node` are the addresses that computed the answer; empty where none was needed.

    Of several answers it tells of the first one; `usage.completion_tokens`, `timing.total_s`, `handoff_bytes` and
    `retries` are of all. `prefix_hash` names the prompt's full blocks in a kvstore; empty when it has none.
    """

    reason: FinishReason
    usage: Usage
    timing: Timing
    prefill_node: str = ""
    decode_node: str = ""
    handoff_bytes: int = 0
    stop_string: str = ""
    retries: int = 0
    prefix_hash: bytes = b""
    from_response_cache: bool = False  # nothing was computed: it is an earlier answer to the same request


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The terminal event of an accepted request of which an answer stayed incomplete; fields as of kvrelay.errors."""

    code: str
    message: str
    retryable: bool
    retry_after_s: float = 0.0


GenerateEvent = RequestAccepted | TokensGenerated | ChoiceFinished | RequestFinished | RequestFailed


def check_priority(priority: int) -> None:
    """Raises InvalidRequestError, naming value and what is allowed."""
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(f"priority is {priority}; allowed is [{MIN_PRIORITY}, {MAX_PRIORITY}]")
