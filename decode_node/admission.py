"""What a decode node refuses before it looks for blocks. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.cluster import ModelInfo
from kvrelay.errors import InvalidRequestError, NeverFitsError, PromptTooLongError
from kvrelay.messages import NodeRequest
from kvrelay.sampling import fork_seed
from kvrelay.types import check_token_id


def check_request(request: NodeRequest, num_tokens: int, info: ModelInfo, num_tokens_now: int = 0) -> None:
    """Raises InvalidRequestError or PromptTooLongError, naming what is wrong and what is allowed.

    `num_tokens` are the positions to hold: all of the prompt and of max_tokens, as far as the model goes;
    `num_tokens_now` those of them to set aside at once, 0 for as many as the node's limits say.
    """
    num_given, num_prompt = len(request.token_ids), request.num_prompt_tokens
    if num_given == 0:
        raise InvalidRequestError("token_ids is empty; at least one token is needed")
    if not 1 <= num_prompt <= num_given:
        raise InvalidRequestError(f"num_prompt_tokens is {num_prompt}; allowed is [1, {num_given}], the tokens given")
    for token_id in request.token_ids:
        check_token_id("token_ids", token_id, info.vocab_size)
    sampling = request.sampling
    sampling.validate(info.vocab_size)
    if sampling.max_tokens is None or sampling.seed is None:
        raise InvalidRequestError("max_tokens and seed must be set; the coordinator settles them")
    if num_given - num_prompt >= sampling.max_tokens:
        raise InvalidRequestError(
            f"{num_given - num_prompt} of max_tokens {sampling.max_tokens} are generated; nothing is left to do"
        )
    if max(num_given + 1, num_tokens) > info.max_model_len:
        raise PromptTooLongError(
            f"{max(num_given + 1, num_tokens)} tokens of prompt and answer; the model takes {info.max_model_len}"
        )
    needed = min(num_prompt + sampling.max_tokens, info.max_model_len)
    if num_tokens < needed:
        raise InvalidRequestError(f"num_tokens is {num_tokens}; prompt and answer may take {needed}")
    if num_tokens_now and not num_given < num_tokens_now <= num_tokens:
        raise InvalidRequestError(
            f"num_tokens_now is {num_tokens_now}; allowed is 0, or [{num_given + 1}, {num_tokens}]: more than the "
            "tokens given and at most num_tokens"
        )


def check_fits(num_blocks: int, num_blocks_of_pool: int) -> None:
    """Raises NeverFitsError for a request that the whole pool could not hold at its longest, whatever is set aside
    for it at first."""
    if num_blocks > num_blocks_of_pool:
        raise NeverFitsError(f"{num_blocks} KV blocks are needed; this node has {num_blocks_of_pool} in all")


def fork_request(given: NodeRequest, index: int) -> NodeRequest:
    """The request of answer `index`, at least 1, to the prompt of `given`. Raises InvalidRequestError."""
    if index < 1:
        raise InvalidRequestError(f"index is {index}; allowed is at least 1, since 0 is the request itself")
    if len(given.token_ids) > given.num_prompt_tokens or given.sampling.seed is None:
        raise InvalidRequestError("an answer that is resumed here has no forks; reserve for the prompt instead")
    return replace(given, sampling=replace(given.sampling, seed=fork_seed(given.sampling.seed, index)))
