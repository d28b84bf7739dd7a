"""One request as an engine runs it: its tokens, its blocks, how far its KV is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.kv.chain import GROUP_BLOCKS, Chain, ChainBlock, home_of
from kvrelay.kv.hashing import block_hash, block_hashes
from kvrelay.matcher import Matcher
from kvrelay.messages import NodeRequest
from kvrelay.types import BlockHash, BlockId, FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state on one node. Owned by the event loop until it is handed to the engine thread, then by that.

    `token_ids` are the prompt and everything generated so far. KV of positions [0, num_computed_tokens) lies in
    `block_table`; the last token's KV is never there before the step that draws its successor.
    """

    request: NodeRequest
    root: BlockHash  # parent of the first block's hash
    block_tokens: int
    token_ids: list[int]
    num_prompt_tokens: int  # of the original prompt; what follows is output, also when a request is resumed
    block_table: list[BlockId]
    block_hashes: list[BlockHash]  # one for each full block of token_ids
    num_computed_tokens: int = 0
    num_registered_blocks: int = 0  # leading blocks whose hash the pool has been told
    itl_target_s: float = 0.0  # that may pass between two of its tokens; 0: no matter how long
    matcher: Matcher | None = None  # of what the answer is held to; has taken every output token

    @classmethod
    def create(
        cls, request: NodeRequest, root: BlockHash, block_tokens: int, matcher: Matcher | None = None
    ) -> Sequence:
        """A sequence without blocks; hashes every full block of the request's tokens. `matcher` has taken those that
        are output."""
        return cls(
            request=request,
            root=root,
            block_tokens=block_tokens,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_table=[],
            block_hashes=block_hashes(root, request.token_ids, block_tokens),
            matcher=matcher,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_reusable_blocks(self) -> int:
        """Leading full blocks that may be taken from a cache: the last token is always computed, for its logits."""
        return (len(self.token_ids) - 1) // self.block_tokens

    def append(self, token_id: int) -> None:
        """Adds a drawn token; hashes the block it fills."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.advance((token_id,))
        if len(self.token_ids) % self.block_tokens == 0:
            parent = self.block_hashes[-1] if self.block_hashes else self.root
            self.block_hashes.append(block_hash(parent, self.token_ids[-self.block_tokens :]))

    def unregistered_blocks(self) -> list[tuple[BlockId, BlockHash]]:
        """Blocks that are full and computed and of which the pool has not been told."""
        num_full = self.num_computed_tokens // self.block_tokens
        span = slice(self.num_registered_blocks, num_full)
        return list(zip(self.block_table[span], self.block_hashes[span], strict=True))

    @property
    def chain(self) -> Chain:
        """What a store is told of all its blocks; there is a full one."""
        return Chain(home_of(self.block_hashes), self.request.tenant, self.request.cache_ttl_s)

    def blocks_to_keep(self, indexes: Iterable[int]) -> list[ChainBlock]:
        """Full blocks at these places, ascending, as a store is told of them.

        The last one of the first group brings the others of it along: the chain has its home from that block on, and
        there a block is taken only after those before it.
        """
        wanted = list(indexes)
        if GROUP_BLOCKS - 1 in wanted:
            wanted = [*range(GROUP_BLOCKS), *(index for index in wanted if index >= GROUP_BLOCKS)]
        if not wanted:
            return []
        chain, hashes = self.chain, self.block_hashes
        return [ChainBlock(hashes[index], hashes[index - 1] if index else self.root, index, chain) for index in wanted]

    def finish_reason(self, eos_token_ids: tuple[int, ...], max_model_len: int) -> FinishReason | None:
        """Whether the last token, a drawn one, ends the answer. Stop strings are the coordinator's affair."""
        sampling = self.request.sampling
        last = self.token_ids[-1]
        if sampling.ends_answer(last, self.num_output_tokens, eos_token_ids):
            return FinishReason.STOP
        if sampling.max_tokens is not None and self.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        if self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None
