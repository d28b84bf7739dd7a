"""How much to set aside for an answer: python -m bench.reserve

Runs the decode node's own engine core, with its scheduler and its pool, on a model that takes no time, and counts.
A step's time is then put together from a fixed part and one for each token, as `--step-ms` and `--token-ms` say.
Answers end where a client's would, some at max_tokens, most earlier. It reads no clock: numbers are the same anywhere.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from decode_node.engine import DecodeCore
from decode_node.scheduler import Scheduler
from kvrelay.cluster import ModelInfo
from kvrelay.engine.batch import Batch
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import OverloadedError
from kvrelay.kv.hashing import Buffer, chain_root
from kvrelay.kv.layout import KVLayout
from kvrelay.kv.pool import BlockPool
from kvrelay.limits import DecodeLimits
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockId, RequestId, ReservationId

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_tokens=16)
INFO = ModelInfo("none", "ab" * 32, "none", 8_192, 100_000, (2,), LAYOUT, "float32", "none")
STOP_ID = 99_999


class NoCache:
    """There is no KV."""

    def read_slab(self, block_id: BlockId) -> bytes:
        return b""

    def write_slab(self, block_id: BlockId, payload: Buffer) -> None: ...

    def write_part(self, block_id: BlockId, payload: Buffer, offset_bytes: int) -> None: ...

    def copy_block(self, source: BlockId, target: BlockId) -> None: ...


class NoModel:
    """Ends each answer after the number of tokens that its seed says."""

    def run(self, batch: Batch) -> list[GeneratedToken | None]:
        return [self._draw(row.sequence) if row.yields_token else None for row in batch.rows]

    def _draw(self, sequence: Sequence) -> GeneratedToken:
        ends = sequence.num_output_tokens + 1 >= (sequence.request.sampling.seed or 0)
        return GeneratedToken(STOP_ID if ends else sequence.num_tokens)


@dataclass
class Counts:
    num_steps: int = 0
    num_tokens: int = 0
    num_generated: int = 0
    num_preempted: int = 0
    num_rows: int = 0


def make_requests(num: int, prompt_tokens: int, max_tokens: int, share: float) -> deque[NodeRequest]:
    """`share` is the mean length of an answer, of max_tokens; lengths are exponential and cut there."""
    draw = random.Random(0)
    requests = deque[NodeRequest]()
    for number in range(num):
        length = max_tokens if share >= 1 else min(max_tokens, 1 + int(draw.expovariate(1 / (share * max_tokens))))
        prompt = tuple(draw.randrange(90_000) for _ in range(prompt_tokens))
        sampling = SamplingParams(seed=length, max_tokens=max_tokens, stop_token_ids=(STOP_ID,))
        requests.append(NodeRequest(RequestId(str(number)), prompt, prompt_tokens, sampling))
    return requests


def run(requests: deque[NodeRequest], num_blocks: int, limits: DecodeLimits) -> Counts:
    """All of them, as soon as the node grants each its blocks."""
    core = DecodeCore(
        info=INFO, runner=NoModel(), cache=NoCache(), pool=BlockPool(num_blocks), scheduler=Scheduler(limits)
    )
    counts = Counts()
    while requests or core.has_work():
        while requests and admit(core, requests[0], limits):
            requests.popleft()
        done = core.step()
        counts.num_steps += 1
        counts.num_tokens += done.num_tokens
        counts.num_rows += done.num_rows
        counts.num_generated += sum(advanced.token is not None for advanced in done.advanced)
        counts.num_preempted += len(done.preempted)
    return counts


def admit(core: DecodeCore, request: NodeRequest, limits: DecodeLimits) -> bool:
    """As after a handoff: the prompt's KV is there, and the first token."""
    sequence = Sequence.create(request, chain_root("", "", b""), LAYOUT.block_tokens)
    most = request.num_prompt_tokens + (request.sampling.max_tokens or 0)
    reservation_id = ReservationId(request.request_id)
    try:
        core.reserve(reservation_id, (), LAYOUT.blocks_for(limits.num_reserved(sequence.num_tokens, most)))
    except OverloadedError:
        return False
    sequence.num_computed_tokens = sequence.num_tokens
    sequence.append(1)
    core.commit(reservation_id, sequence, run=True, finished=False)
    return True


def main(argv: Seq[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    print("| mean answer, of max_tokens | set aside | seconds | rows a step | preemptions | recomputed tokens |")
    print("| --- | --- | --- | --- | --- | --- |")
    for share in options.shares:
        for reserve in options.reserve:
            limits = DecodeLimits(options.max_batch, 512, 1_000_000, reserve)
            requests = make_requests(options.requests, options.prompt_tokens, options.max_tokens, share)
            counts = run(requests, options.num_blocks, limits)
            seconds = (options.step_ms * counts.num_steps + options.token_ms * counts.num_tokens) / 1_000
            print(
                f"| {share:.0%} | {reserve or 'all'} | {seconds:.1f} | {counts.num_rows / counts.num_steps:.1f} "
                f"| {counts.num_preempted} | {counts.num_tokens - counts.num_generated} |"
            )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.reserve", description="How much to set aside for an answer.")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of a step, however many tokens it has")
    parser.add_argument("--token-ms", type=float, default=1.0, help="of each token of a step")
    parser.add_argument("--reserve", type=int, nargs="+", default=[0, 128, 64, 16, 1], help="0 is all of max_tokens")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1])
    return parser


if __name__ == "__main__":
    sys.exit(main())
