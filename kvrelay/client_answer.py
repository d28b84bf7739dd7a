"""An answer, or several to one prompt, as a client saw them arrive: text, times, and the facts and figures."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrelay.client import AnswerEvent
from kvrelay.client_command import size
from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, TokensGenerated
from kvrelay.sampling import GeneratedToken, fork_seed
from kvrelay.types import CachedTokens

_TIERS = ("device", "memory", "disk")


@dataclass(slots=True)
class ClientChoice:
    """What came of one answer; `gaps_s` lie between tokens that follow each other. `finished` is for one of several."""

    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    finished: ChoiceFinished | None = None
    last_token_at: float = 0.0

    def add(self, event: TokensGenerated, now: float) -> None:
        self.text += event.text
        if not event.tokens:
            return
        if self.tokens:
            self.gaps_s += [(now - self.last_token_at) / len(event.tokens)] * len(event.tokens)
        self.tokens += event.tokens
        self.last_token_at = now

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"text": self.text, "token_ids": [token.token_id for token in self.tokens]}
        if any(token.logprobs for token in self.tokens):
            described["logprobs"] = [asdict(token.logprobs) if token.logprobs else None for token in self.tokens]
        return described


@dataclass(slots=True)
class ClientAnswer:
    """What came, by index, and when by this process's clock."""

    started_at: float
    choices: defaultdict[int, ClientChoice] = field(default_factory=lambda: defaultdict(ClientChoice))
    first_token_s: float = 0.0
    accepted: RequestAccepted | None = None
    finished: RequestFinished | None = None

    @property
    def tokens(self) -> list[GeneratedToken]:
        """Of all answers, one after another."""
        return [token for _, choice in sorted(self.choices.items()) for token in choice.tokens]

    @property
    def gaps_s(self) -> list[float]:
        """Of all answers."""
        return [gap for choice in self.choices.values() for gap in choice.gaps_s]

    def add(self, event: AnswerEvent, now: float) -> None:
        match event:
            case RequestAccepted():
                self.accepted = event
            case TokensGenerated():
                if event.tokens and not any(choice.tokens for choice in self.choices.values()):
                    self.first_token_s = now - self.started_at
                self.choices[event.index].add(event, now)
            case ChoiceFinished():
                self.choices[event.index].finished = event
            case RequestFinished():
                self.finished = event


def cached_by_tier(cached: CachedTokens) -> str:
    """ "cached: 64 device, 16 disk", or "none cached"."""
    tiers = ", ".join(f"{getattr(cached, tier)} {tier}" for tier in _TIERS if getattr(cached, tier))
    return f"cached: {tiers}" if tiers else "none cached"


def facts(answer: ClientAnswer) -> str:
    """The line under an answer."""
    finished = answer.finished
    assert finished is not None
    parts = [
        f"{finished.usage.prompt_tokens} prompt tokens ({cached_by_tier(finished.usage.cached)})",
        _out(answer, finished),
        f"TTFT {_ms(answer.first_token_s)}",
    ]
    if answer.gaps_s:
        p50, p95 = percentiles(answer.gaps_s)
        parts.append(f"inter-token p50 {_ms(p50)}, p95 {_ms(p95)}")
    parts.append(f"KV handed over {size(finished.handoff_bytes)}")
    if finished.from_response_cache:
        parts.append("an earlier answer, given again")
    if finished.retries:
        parts.append(f"retries {finished.retries}")
    return "[" + " | ".join(parts) + "]"


def describe(answer: ClientAnswer) -> dict[str, Any]:
    """The object of --json. Times in seconds; those under "client" by this process's clock."""
    finished, accepted = answer.finished, answer.accepted
    assert finished is not None
    assert accepted is not None
    p50, p95 = percentiles(answer.gaps_s)
    return {
        "request_id": accepted.request_id,
        **_outcome(answer, accepted, finished),
        "usage": {
            "prompt_tokens": finished.usage.prompt_tokens,
            "completion_tokens": finished.usage.completion_tokens,
            "cached_tokens": asdict(finished.usage.cached),
        },
        "timing": {
            **asdict(finished.timing),
            "client": {"first_token_s": answer.first_token_s, "inter_token_p50_s": p50, "inter_token_p95_s": p95},
        },
        "nodes": {"prefill": finished.prefill_node, "decode": finished.decode_node},
        "handoff_bytes": finished.handoff_bytes,
        "retries": finished.retries,
        "from_response_cache": finished.from_response_cache,
        "prefix_hash": finished.prefix_hash.hex(),
    }


def _outcome(answer: ClientAnswer, accepted: RequestAccepted, finished: RequestFinished) -> dict[str, Any]:
    """What was generated: the one answer's fields, or a list of several answers, each with the seed that alone would
    give it."""
    ends = _ends(answer)
    if not ends:
        end = {"finish_reason": finished.reason.value, "stop_string": finished.stop_string}
        return {**answer.choices[0].describe(), **end, "seed": accepted.seed}
    choices = [
        {
            "index": end.index,
            **answer.choices[end.index].describe(),
            "finish_reason": end.reason.value,
            "stop_string": end.stop_string,
            "seed": fork_seed(accepted.seed, end.index),
        }
        for end in ends
    ]
    return {"choices": choices, "seed": accepted.seed}


def _ends(answer: ClientAnswer) -> list[ChoiceFinished]:
    """By index; of one answer that is the only one there are none."""
    return [choice.finished for _, choice in sorted(answer.choices.items()) if choice.finished]


def _out(answer: ClientAnswer, finished: RequestFinished) -> str:
    """As in "12 tokens out (stop)"; of several in "3 answers, 36 tokens out (2 stop, 1 length)"."""
    num_tokens = finished.usage.completion_tokens
    tokens = f"{num_tokens} {'token' if num_tokens == 1 else 'tokens'} out"
    ends = _ends(answer)
    if not ends:
        return f"{tokens} ({finished.reason.value})"
    counts = Counter(end.reason.value for end in ends)
    return f"{len(ends)} answers, {tokens} ({', '.join(f'{count} {reason}' for reason, count in counts.most_common())})"


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 95th; zeros without values."""
    if len(values) < 2:
        value = values[0] if values else 0.0
        return value, value
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
