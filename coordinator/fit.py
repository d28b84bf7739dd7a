"""What can never run is refused at once, before it waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.cluster import ModelInfo
from kvrelay.errors import NeverFitsError, PromptTooLongError
from kvrelay.kv.layout import KVLayout


@dataclass(frozen=True, slots=True)
class Capacity:
    """Blocks of the largest pool of each kind of node."""

    decode_blocks: int
    prefill_blocks: int


def settle_max_tokens(num_prompt_tokens: int, max_tokens: int | None, default_max_tokens: int, model: ModelInfo) -> int:
    """Tokens the request may generate. Raises PromptTooLongError when prompt and answer exceed the model."""
    room = model.max_model_len - num_prompt_tokens
    if room < 1:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens; {model.name} takes {model.max_model_len} tokens, prompt and "
            "answer together"
        )
    if max_tokens is None:
        return min(default_max_tokens, room)
    if max_tokens > room:
        raise PromptTooLongError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together "
            f"{num_prompt_tokens + max_tokens}; {model.name} takes {model.max_model_len} tokens"
        )
    return max_tokens


def check_capacity(num_prompt_tokens: int, max_tokens: int, layout: KVLayout, capacity: Capacity) -> None:
    """Raises NeverFitsError when no node, however idle, could hold the request."""
    needed = layout.blocks_for(num_prompt_tokens)
    if needed > capacity.prefill_blocks:
        raise NeverFitsError(
            f"the prompt needs {needed} KV blocks of {layout.block_tokens} tokens; the largest prefill node has "
            f"{capacity.prefill_blocks}: shorten the prompt"
        )
    if max_tokens == 1:
        return  # answered by the prefill node alone
    needed = layout.blocks_for(num_prompt_tokens + max_tokens)
    if needed > capacity.decode_blocks:
        raise NeverFitsError(
            f"prompt and max_tokens need {needed} KV blocks of {layout.block_tokens} tokens; the largest decode node "
            f"has {capacity.decode_blocks}: shorten the prompt or lower max_tokens"
        )
