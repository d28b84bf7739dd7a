"""What a request consumed, as OpenAI's API tells it."""

from __future__ import annotations

from typing import Any

from kvrelay.inference import Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached.total},
    }
