"""How far from the truth forecasts are where clients ask again once they have their answer: one node of each role.

Prompts and nodes are about those of `python -m bench.forecast`, but that each engine has its processor for itself."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.sim.cluster import Setup, Simulation
from bench.sim.load import Arrival, block_hashes
from bench.sim.request import SimRequest
from bench.sim.results import quantile
from bench.sim.shapes import NodeShape, StepTime
from bench.sim.tables import cell, table
from bench.sim.tasks import Options, measure_lines
from kvrelay.limits import DecodeLimits, PrefillLimits, QueueMarks
from kvrelay.types import RequestId

NUM_CLIENTS = (1, 4, 8, 16)
NUM_WARM = 50  # requests that are not judged: corrections are learned from them
SHAPE = NodeShape(
    token_bytes=23_040,
    num_decode_blocks=4_096,
    num_prefill_blocks=4_096,
    decode=StepTime(0.010, 0.003, 0.000_6),
    prefill=StepTime(0.005, 0.0, 0.000_6),
    link_bytes_per_s=3e8,
    call_s=0.002,
    status_interval_s=0.001,  # as nodes do: at once, where something changed
    decode_limits=DecodeLimits(max_batch=64, max_batched_tokens=512),
    prefill_limits=PrefillLimits(max_batched_tokens=512, chunk_tokens=512, max_prefills=4, max_waiting=4),
    marks=QueueMarks(),
)


_SHARED = block_hashes(Arrival(0.0, 256, 0, 0, hash_ids=(0,)), SHAPE.block_tokens, 0)  # 256 tokens


@dataclass(frozen=True, slots=True)
class Task:
    num_clients: int
    number: int
    options: Options


@dataclass(frozen=True, slots=True)
class Measured:
    """Of requests from their placement on."""

    came_p50_s: float
    came_p95_s: float
    error_p50: float  # of what was forecast
    factor_p95: float  # between what was forecast and what came, whichever is more


class ClosedLoop(Simulation):
    def __init__(self, num_clients: int, num_requests: int, seed: int) -> None:
        super().__init__(Setup(num_prefill=1, num_decode=1, shape=SHAPE, max_queue_wait_s=600.0), seed)
        self._num_clients = num_clients
        self._num_left = num_requests
        self._source = random.Random(seed)

    def run_all(self) -> list[SimRequest]:
        """In the order of their ends."""
        for _ in range(self._num_clients):
            self.clock.at(self._start_s(), self._ask)
        self.clock.run()
        self.check_empty()
        return self._requests

    def _ask(self) -> None:
        if self._num_left == 0:
            return
        self._num_left -= 1
        source = self._source
        num_prompt = int(math.exp(source.uniform(math.log(32), math.log(1_024))))
        is_shared = source.random() < 1 / 3
        num_prompt = min(1_024, 256 + num_prompt) if is_shared else num_prompt
        arrival = Arrival(self.clock.now, num_prompt, source.randint(8, 64), 64)
        hashes = block_hashes(arrival, SHAPE.block_tokens, self._num_hashes)
        self._num_hashes += len(hashes)
        if is_shared:
            hashes[: len(_SHARED)] = _SHARED
        self.coordinator.ask(SimRequest(RequestId(f"r{next(self._unique)}"), arrival, SHAPE.block_tokens, hashes))

    def _ended(self, request: SimRequest) -> None:
        self._requests.append(request)
        self.clock.after(SHAPE.call_s, self._ask)


def measure(task: Task) -> Measured:
    requests = ClosedLoop(task.num_clients, task.options.num_requests, task.number).run_all()[NUM_WARM:]
    seen = [
        (one.first_token_at - one.placed_forecast.at, one.placed_forecast.ttft_s)
        for one in requests
        if one.first_token_at is not None and one.placed_forecast is not None
    ]
    came = [came_s for came_s, _ in seen]
    return Measured(
        quantile(came, 0.5),
        quantile(came, 0.95),
        quantile([abs(came_s / forecast_s - 1) for came_s, forecast_s in seen], 0.5),
        quantile([max(came_s / forecast_s, forecast_s / came_s) for came_s, forecast_s in seen], 0.95),
    )


def _measured(task: Task) -> dict[float, Measured]:
    return {task.num_clients: measure(task)}


def report(options: Options) -> str:
    tasks = [Task(count, number, options) for count in NUM_CLIENTS for number in range(options.num_slices)]
    groups = measure_lines(_measured, tasks, lambda task, num_clients: num_clients, options)
    rows = [
        [
            f"{num_clients:g}",
            cell([one.came_p50_s for one in group]),
            cell([one.came_p95_s for one in group]),
            cell([100 * one.error_p50 for one in group], ".0f"),
            cell([one.factor_p95 for one in group], ".1f"),
        ]
        for num_clients, group in groups.items()
    ]
    columns = ("clients", "TTFT p50, s", "p95, s", "error p50, %", "off by p95, times")
    return (
        "Forecasts (virtual time): clients that ask again once they have their answer; first tokens from placement on"
        f"\n\n{table(columns, rows)}"
    )
