"""What the modelled nodes are: how long their work takes, how much they hold, how often they tell of themselves."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.limits import DecodeLimits, PrefillLimits, QueueMarks

_DECODE_LIMITS = DecodeLimits(max_batch=256, max_batched_tokens=512, max_requests=512)
_PREFILL_LIMITS = PrefillLimits(max_batched_tokens=512, chunk_tokens=512, max_prefills=4, max_waiting=4)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step of an engine: `fixed_s`, `row_s` for each sequence that gets a token, `prompt_token_s` for
    each token of a prompt."""

    fixed_s: float
    row_s: float
    prompt_token_s: float

    def of(self, num_rows: int, num_prompt_tokens: int) -> float:
        return self.fixed_s + self.row_s * num_rows + self.prompt_token_s * num_prompt_tokens


@dataclass(frozen=True, slots=True)
class NodeShape:
    """Of all nodes of a cluster. The defaults stand for an 8B model in 16 bits (128 KiB of KV a token) on a GPU of some
    250 TFLOPS and 1 TB/s with room for 128,000 tokens of KV: 20 ms a step, 3,900 tokens of prompt a second, and a link
    of 25 Gbit/s, which moves KV five times as fast as it is computed."""

    block_tokens: int = 16
    token_bytes: int = 131_072
    num_decode_blocks: int = 8_000
    num_prefill_blocks: int = 8_000
    decode: StepTime = StepTime(0.020, 0.000_2, 0.000_25)
    prefill: StepTime = StepTime(0.004, 0.0, 0.000_25)
    link_bytes_per_s: float = 2.5e9
    call_s: float = 0.001  # one way between coordinator and node
    status_interval_s: float = 0.25  # a node tells of itself so often, where something changed
    tells_prompt_rate: bool = True  # decode nodes say how fast they compute prompts
    decode_limits: DecodeLimits = _DECODE_LIMITS
    prefill_limits: PrefillLimits = _PREFILL_LIMITS
    marks: QueueMarks | None = None  # of waits, by which prefill steps adapt; None: they have what the limits say

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)
