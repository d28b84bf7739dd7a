"""What chats, completions and responses have in common: how answers are drawn and end, what holds for the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from coordinator.http.body import Entries, Fields
from coordinator.http.errors import FieldError
from coordinator.http.structure import ResponseFormat, StructuredOutputs, only_one, structures
from kvrelay.inference import GenerateRequest, Prompt
from kvrelay.sampling import MAX_LOGIT_BIAS, SamplingParams
from kvrelay.structured import StructuredOutput

RETENTION_S = {"in_memory": None, "in-memory": None, "24h": 86_400.0}  # None: the tenant's own time
TIER_PRIORITIES = {"auto": None, "default": None, "flex": -10, "priority": 10}  # None: the tenant's usual one
SAMPLING_NAMES = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                  "seed", "min_tokens", "ignore_eos")  # fmt: skip

# Fields that change no answer: names for the client's own use, and hints at prefixes, which are found by themselves.
LABELS = ("user", "safety_identifier", "metadata", "session_id", "prompt_cache_key", "spaces_between_special_tokens")


def _not_too_many(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_LOGIT_BIAS:
        raise PydanticCustomError("too_many", "at most {most} entries are allowed", {"most": MAX_LOGIT_BIAS})
    return biases


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationFields(Fields):
    """null is as good as a field left out."""

    model: str | None = None
    temperature: float | None = Field(None, description="0 to 2; 0 is greedy.")
    top_p: float | None = Field(None, description="Above 0, at most 1.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    presence_penalty: float | None = Field(None, description="-2 to 2.")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_not_too_many)] | None = Field(
        None, description="By token id, -100 to 100."
    )
    seed: int | None = Field(None, description="0 to 2**64 - 1.")
    stop: str | Entries[str] | None = Field(None, description="At most 16, each of 1 to 1,000 characters.")
    stream: bool | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    # vLLM's
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Entries[str] | None = None
    guided_grammar: str | None = None
    top_k: int | None = Field(None, description="0 or -1: any number.")
    min_p: float | None = Field(None, description="0 to 1.")
    repetition_penalty: float | None = Field(None, description="Above 0, at most 10.")
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Entries[int] | None = None
    include_stop_str_in_output: bool | None = None
    spaces_between_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = Field(None, description="-100 to 100; lower is served earlier, as in vLLM.")
    request_id: str | None = None
    session_id: str | None = None
    # kvrelay's own, as in inference.proto
    public_cache: str | None = None
    cache_ttl_s: float | None = None
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    best_effort: bool | None = None
    keep_s: float | None = None

    @property
    def num_choices(self) -> int:
        return 1

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Ranges are for SamplingParams.validate, which knows the vocabulary. Raises FieldError."""
        given = {name: getattr(self, name) for name in SAMPLING_NAMES if getattr(self, name) is not None}
        return SamplingParams(
            top_k=0 if self.top_k in (None, -1) else self.top_k,
            logit_bias=_logit_bias(self.logit_bias or {}),
            max_tokens=max_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
            structured=self.structure(),
            **given,
        )

    def structure(self) -> StructuredOutput | None:
        """What answers are held to. Raises FieldError."""
        found = list(structures(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar))
        if self.structured_outputs is not None:
            found += self.structured_outputs.structures()
        return only_one(found)

    def to_request(self, prompt: Prompt, sampling: SamplingParams, request_id: str) -> GenerateRequest:
        """Raises FieldError for what only this door says otherwise."""
        request = GenerateRequest(
            prompt,
            sampling,
            request_id=request_id,
            model=self.model or "",
            n=self.num_choices,
            cache_salt=self.cache_salt,
            public_cache=self.public_cache or "",
            cache_ttl_s=self._ttl_s(),
            priority=self._priority(),
            ttft_target_s=self.ttft_target_s,
            itl_target_s=self.itl_target_s,
            best_effort=bool(self.best_effort),
        )
        return request if self.keep_s is None else replace(request, keep_s=self.keep_s)

    def _ttl_s(self) -> float | None:
        if self.prompt_cache_retention is None:
            return self.cache_ttl_s
        if self.cache_ttl_s is not None:
            raise FieldError("prompt_cache_retention and cache_ttl_s are both set; choose one", "cache_ttl_s")
        return RETENTION_S[self.prompt_cache_retention]

    def _priority(self) -> int | None:
        """vLLM's counts the other way round, from 0, which is everyone's usual one."""
        tier = None if self.service_tier is None else TIER_PRIORITIES[self.service_tier]
        if not self.priority:
            return tier
        if tier is not None:
            raise FieldError(f"priority and service_tier {self.service_tier!r} are both set; choose one", "priority")
        return -self.priority


class ChoicesFields(GenerationFields):
    """What chats and completions have, and responses have not."""

    n: int | None = Field(None, description="Answers to each prompt, 1 to 128.")
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check_stream_options(self) -> None:
        """Raises FieldError."""
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options is given, but stream is not true", "stream_options")

    def structure(self) -> StructuredOutput | None:
        """Raises FieldError."""
        formatted = self.response_format.structure() if self.response_format is not None else None
        other = super().structure()
        return only_one([one for one in (other, formatted) if one is not None])


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    by_id = {}
    for key, bias in biases.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise FieldError(f"logit_bias has the key {key[:64]!r}; allowed are token ids", "logit_bias")
        by_id[int(key)] = bias
    return by_id
