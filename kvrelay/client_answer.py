"""An answer as a client saw it arrive: its text, its times, and the facts and figures of it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvrelay.client import AnswerEvent
from kvrelay.client_command import size
from kvrelay.inference import RequestAccepted, RequestFinished, TokensGenerated
from kvrelay.sampling import GeneratedToken

_TIERS = ("device", "memory", "disk")


@dataclass(slots=True)
class ClientAnswer:
    """What came, and when by this process's clock; `gaps_s` lie between tokens that follow each other."""

    started_at: float
    text: str = ""
    tokens: list[GeneratedToken] = field(default_factory=list)
    first_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    accepted: RequestAccepted | None = None
    finished: RequestFinished | None = None
    last_token_at: float = 0.0

    def add(self, event: AnswerEvent, now: float) -> None:
        match event:
            case RequestAccepted():
                self.accepted = event
            case TokensGenerated():
                self.text += event.text
                self._add_tokens(event.tokens, now)
            case RequestFinished():
                self.finished = event

    def _add_tokens(self, tokens: Sequence[GeneratedToken], now: float) -> None:
        if not tokens:
            return
        if not self.tokens:
            self.first_token_s = now - self.started_at
        else:
            self.gaps_s += [(now - self.last_token_at) / len(tokens)] * len(tokens)
        self.tokens += tokens
        self.last_token_at = now


def facts(answer: ClientAnswer) -> str:
    """The line under an answer."""
    finished = answer.finished
    assert finished is not None
    usage, cached = finished.usage, finished.usage.cached
    tiers = ", ".join(f"{getattr(cached, tier)} {tier}" for tier in _TIERS if getattr(cached, tier))
    tokens = "token" if usage.completion_tokens == 1 else "tokens"
    parts = [
        f"{usage.prompt_tokens} prompt tokens ({f'cached: {tiers}' if tiers else 'none cached'})",
        f"{usage.completion_tokens} {tokens} out ({finished.reason.value})",
        f"TTFT {_ms(answer.first_token_s)}",
    ]
    if answer.gaps_s:
        p50, p95 = percentiles(answer.gaps_s)
        parts.append(f"inter-token p50 {_ms(p50)}, p95 {_ms(p95)}")
    parts.append(f"KV handed over {size(finished.handoff_bytes)}")
    if finished.retries:
        parts.append(f"retries {finished.retries}")
    return "[" + " | ".join(parts) + "]"


def describe(answer: ClientAnswer) -> dict[str, Any]:
    """The object of --json. Times in seconds; those under "client" by this process's clock."""
    finished, accepted = answer.finished, answer.accepted
    assert finished is not None
    assert accepted is not None
    p50, p95 = percentiles(answer.gaps_s)
    result = {
        "request_id": accepted.request_id,
        "text": answer.text,
        "token_ids": [token.token_id for token in answer.tokens],
        "finish_reason": finished.reason.value,
        "stop_string": finished.stop_string,
        "seed": accepted.seed,
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
    }
    if any(token.logprobs for token in answer.tokens):
        result["logprobs"] = [asdict(token.logprobs) if token.logprobs else None for token in answer.tokens]
    return result


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 95th; zeros without values."""
    if len(values) < 2:
        value = values[0] if values else 0.0
        return value, value
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
