"""How tokens are drawn, and what a draw gives."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Container
from dataclasses import dataclass, field

from kvrelay.errors import InvalidRequestError
from kvrelay.structured import StructuredOutput
from kvrelay.types import check_token_id

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_000
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when the answer ends. Defaults are the field's.

    A draw depends on (seed, position) only. `seed` and `max_tokens` are None until the coordinator settles them.
    `logprobs` None asks for none; k asks for the drawn token's and the k likeliest. `structured` is what the answer's
    text is held to; None leaves it free.
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
    structured: StructuredOutput | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def ends_answer(self, token_id: int, num_tokens: int, eos_token_ids: Container[int]) -> bool:
        """Whether the answer's token `num_tokens` ends it, as an end-of-sequence token or a stop token id.

        One that is held to something gets an end-of-sequence token too early only where nothing else may follow, and
        ends there.
        """
        if token_id in eos_token_ids and self.structured is not None:
            return True
        stops = token_id in self.stop_token_ids or (not self.ignore_eos and token_id in eos_token_ids)
        return stops and num_tokens >= self.min_tokens

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
        if self.structured is not None:
            self.structured.validate()

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


def fork_seed(seed: int, index: int) -> int:
    """Seed of answer `index` of several to one prompt, in [0, 2**64); the first one's is the request's own.

    Hashed, not added: seed + 1 may well be another request's, and the two answers would be the same.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8, person=b"kvrelay-fork-v1").digest()
    return int.from_bytes(digest, "little")
