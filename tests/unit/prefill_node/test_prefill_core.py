"""The engine core of a prefill node: admission, prefix hits, ownership of blocks at every stage."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.engine.adaptive import AdaptiveBound
from kvrelay.engine.batch import Batch
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, NeverFitsError, OverloadedError
from kvrelay.kv.hashing import chain_root
from kvrelay.kv.meeting import Meeting
from kvrelay.kv.pool import BlockPool, PoolCorruptError
from kvrelay.limits import PrefillLimits, QueueMarks
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockCounts, RequestId, ReservationId
from prefill_node.engine import Admitted, Computed, Failed, JobEvent, PrefillCore
from prefill_node.scheduler import JobId, PrefillScheduler
from tests.support.slot_engine import SlotCache, SlotRunner, draw

BLOCK_TOKENS = 16
ROOT = chain_root("model", "layout", b"")


class FakeRunner:
    """Draws the number of tokens that the sequence has; records the chunks it ran."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []
        self.error: Exception | None = None
        self.bad_lengths: set[int] = set()  # of sequences that get bad logits

    def run(self, batch: Batch) -> Seq[GeneratedToken | BadLogitsError | None]:
        if self.error is not None:
            raise self.error
        self.chunks.append([row.num_tokens for row in batch.rows])
        return [self._drawn(row.sequence.num_tokens) if row.yields_token else None for row in batch.rows]

    def _drawn(self, length: int) -> GeneratedToken | BadLogitsError:
        return BadLogitsError("NaN") if length in self.bad_lengths else GeneratedToken(length)


def make_core(num_blocks: int = 16, budget: int = 512, max_prefills: int = 4, max_waiting: int = 8) -> PrefillCore:
    scheduler = PrefillScheduler(
        PrefillLimits(
            max_batched_tokens=budget, chunk_tokens=budget, max_prefills=max_prefills, max_waiting=max_waiting
        )
    )
    return PrefillCore(
        FakeRunner(), BlockPool(num_blocks), scheduler, lambda block_id: b"slab of block %d" % block_id, BLOCK_TOKENS
    )


def make_sequence(num_tokens: int, first: int = 0) -> Sequence:
    token_ids = tuple(range(first, first + num_tokens))
    request = NodeRequest(RequestId("r"), token_ids, num_tokens, SamplingParams(seed=0, max_tokens=1))
    return Sequence.create(request, ROOT, BLOCK_TOKENS)


def start(core: PrefillCore, job_id: JobId, num_loaded: int = 0) -> None:
    """Begins to compute an admitted job, whose next `num_loaded` blocks came from the store."""
    first = core._jobs[job_id].sequence.num_computed_tokens // BLOCK_TOKENS
    meeting = Meeting(first, first + num_loaded)
    for _ in range(num_loaded):
        assert meeting.load(lambda index: None)
    core.start(job_id, meeting)


def drain(core: PrefillCore) -> list[JobEvent]:
    """Steps until no work is left; what was told."""
    events: list[JobEvent] = []
    while core.has_work():
        events.extend(core.step().events)
    core.check_idle()
    return events


def run_prompt(core: PrefillCore, job: int, num_tokens: int, first: int = 0) -> tuple[int, list[JobEvent]]:
    """A whole job without a store; the blocks it found in the pool and its events after the start."""
    core.submit(JobId(job), make_sequence(num_tokens, first))
    (admitted,) = drain(core)
    assert isinstance(admitted, Admitted)
    start(core, JobId(job))
    events = drain(core)
    core.end(JobId(job))
    drain(core)
    return admitted.num_cached_blocks, events


@pytest.mark.parametrize(
    ("num_tokens", "num_cached_again"),
    [(1, 0), (2, 0), (15, 0), (16, 0), (17, 1), (31, 1), (32, 1), (33, 2)],
)
def test_the_last_token_is_always_computed(num_tokens: int, num_cached_again: int) -> None:
    """Again on the same prompt, at most (n - 1) // 16 blocks come from the pool, and every token is accounted for."""
    core = make_core()
    assert run_prompt(core, 1, num_tokens) == (
        0,
        [Computed(JobId(1), 0, None), Computed(JobId(1), num_tokens, GeneratedToken(num_tokens))],
    )
    assert core.pool.counts() == BlockCounts(
        total=16, free=16 - num_tokens // 16, reserved=0, held=0, cached=num_tokens // 16
    )
    cached = num_cached_again * 16
    assert run_prompt(core, 2, num_tokens) == (
        num_cached_again,
        [Computed(JobId(2), cached, None), Computed(JobId(2), num_tokens, GeneratedToken(num_tokens))],
    )
    assert core.runner.chunks == [[num_tokens], [num_tokens - cached]]  # type: ignore[attr-defined]


def test_chunks_are_told_as_they_end() -> None:
    core = make_core(budget=20)
    _, events = run_prompt(core, 1, 50)
    assert events == [
        Computed(JobId(1), 0, None),
        Computed(JobId(1), 20, None),
        Computed(JobId(1), 40, None),
        Computed(JobId(1), 50, GeneratedToken(50)),
    ]


def test_loaded_blocks_are_not_computed_and_serve_later_prompts() -> None:
    core = make_core()
    core.submit(JobId(1), make_sequence(50))
    drain(core)
    assert core.pool.counts().reserved == 4
    start(core, JobId(1), 2)  # the store gave 2 of the 3 blocks asked for
    assert drain(core) == [Computed(JobId(1), 32, None), Computed(JobId(1), 50, GeneratedToken(50))]
    assert core.runner.chunks == [[18]]  # type: ignore[attr-defined]
    core.end(JobId(1))
    assert run_prompt(core, 2, 50)[0] == 3


def test_a_job_that_needs_blocks_waits_and_those_behind_it_do_not_pass() -> None:
    core = make_core(num_blocks=4)
    core.submit(JobId(1), make_sequence(48))
    core.submit(JobId(2), make_sequence(32, first=1_000))
    core.submit(JobId(3), make_sequence(16, first=2_000))
    assert [event.job_id for event in drain(core)] == [1]
    core.end(JobId(1))
    assert [event.job_id for event in drain(core)] == [2, 3]
    core.end(JobId(2))
    core.end(JobId(3))
    drain(core)
    assert core.pool.counts().held == core.pool.counts().reserved == 0


def test_tokens_that_wait_are_all_that_are_to_be_computed_whether_their_jobs_wait_load_or_compute() -> None:
    core = make_core(budget=32, max_prefills=1)
    run_prompt(core, 9, 64, first=500)
    core.submit(JobId(1), make_sequence(100))
    core.submit(JobId(2), make_sequence(70, first=500))  # 64 of them are cached
    assert core.report().num_waiting_tokens == 100 + 6
    start(core, JobId(1))
    output = core.step()
    assert (output.num_waiting_tokens, output.prompt_tokens) == (68 + 6, (68, 6))
    core.end(JobId(1))
    assert core.report().num_waiting_tokens == 6
    core.end(JobId(2))
    assert core.report().num_waiting_tokens == 0


def test_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    core = make_core(num_blocks=4)
    with pytest.raises(NeverFitsError, match="65 tokens needs 5 KV blocks; this prefill node has 4"):
        core.submit(JobId(1), make_sequence(65))
    core.submit(JobId(2), make_sequence(64))
    assert [event.job_id for event in drain(core)] == [2]


def test_the_shallow_queue_is_bounded() -> None:
    core = make_core(budget=16, max_prefills=1, max_waiting=1)  # 16 tokens are no short prompt then
    core.submit(JobId(1), make_sequence(16))
    core.submit(JobId(2), make_sequence(16))
    with pytest.raises(OverloadedError):
        core.submit(JobId(3), make_sequence(16))
    output = core.step()
    assert (output.num_running, output.num_waiting, output.num_slots_free) == (1, 1, 0)


@pytest.mark.parametrize("stage", ["waiting", "admitted", "started", "half computed", "computed", "unknown"])
def test_a_job_ended_at_any_stage_leaves_nothing(stage: str) -> None:
    core = make_core(num_blocks=8, budget=20, max_prefills=1)
    blocker = stage == "waiting"
    if blocker:
        core.submit(JobId(9), make_sequence(16, first=5_000))
    if stage != "unknown":
        core.submit(JobId(1), make_sequence(50))
    if stage in ("started", "half computed", "computed"):
        start(core, JobId(1), 1)
    if stage == "half computed":
        core.step()
    if stage == "computed":
        drain(core)
    core.end(JobId(1))
    core.end(JobId(1))  # a second end changes nothing
    core.end(JobId(9))
    drain(core)
    counts = core.pool.counts()
    assert (counts.held, counts.reserved) == (0, 0)
    assert counts.cached == {"started": 1, "half computed": 2, "computed": 3}.get(stage, 0)


@pytest.mark.parametrize("num_tokens", [63, 64, 65, 127, 128, 129, 639, 640, 641])
def test_prompts_at_the_edges_of_chunks_are_computed_in_the_fewest_steps(num_tokens: int) -> None:
    core = make_core(num_blocks=64, budget=64)
    _, events = run_prompt(core, 1, num_tokens)
    assert events[-1] == Computed(JobId(1), num_tokens, GeneratedToken(num_tokens))
    chunks = core.runner.chunks  # type: ignore[attr-defined]
    assert [sum(rows) for rows in chunks] == [64] * (num_tokens // 64) + [num_tokens % 64] * (num_tokens % 64 > 0)


def start_admitted(core: PrefillCore) -> list[JobEvent]:
    """Steps until no work is left; admitted jobs start at once, with nothing from a store. What was told."""
    events: list[JobEvent] = []
    while core.has_work():
        news = core.step().events
        events.extend(news)
        for event in news:
            if isinstance(event, Admitted):
                start(core, event.job_id)
    core.check_idle()
    return events


def test_the_second_of_two_prompts_with_the_same_beginning_waits_for_the_firsts_blocks() -> None:
    """40 and 37 tokens, of which 32 are the same: computed are 40 and 5."""
    core = make_core(budget=16)
    core.submit(JobId(1), make_sequence(40))
    core.submit(JobId(2), make_sequence(37))
    core.submit(JobId(3), make_sequence(20, first=3_000))
    events = start_admitted(core)
    admitted = {event.job_id: event.num_cached_blocks for event in events if isinstance(event, Admitted)}
    assert admitted == {1: 0, 3: 0, 2: 2}
    assert list(admitted) == [1, 3, 2], "another prompt passes the one that waits"
    assert sum(map(sum, core.runner.chunks)) == 40 + 5 + 20  # type: ignore[attr-defined]
    assert sum(isinstance(event, Computed) and event.token is not None for event in events) == 3
    for job in (1, 2, 3):
        core.end(JobId(job))
    drain(core)
    assert core.pool.counts() == BlockCounts(total=16, free=13, cached=3)


def test_blocks_that_the_first_prompt_loads_are_the_seconds_at_once() -> None:
    core = make_core(budget=16)
    core.submit(JobId(1), make_sequence(40))
    core.submit(JobId(2), make_sequence(37))
    assert [event.job_id for event in core.report().events] == [1]
    start(core, JobId(1), 2)
    admitted = core.report().events[1]
    assert isinstance(admitted, Admitted)
    assert (admitted.job_id, admitted.num_cached_blocks) == (2, 2)


@pytest.mark.parametrize("how", ["cancelled", "cancelled while loading", "bad logits", "failed step"])
def test_when_the_first_prompt_ends_early_the_second_computes_what_is_missing(how: str) -> None:
    core = make_core(budget=16)
    core.submit(JobId(1), make_sequence(40))
    core.submit(JobId(2), make_sequence(37))
    assert [event.job_id for event in core.step().events] == [1]
    if how != "cancelled while loading":
        start(core, JobId(1))
        core.step()  # 16 of its tokens
    if how == "bad logits":
        core.runner.bad_lengths = {40}  # type: ignore[attr-defined]
    if how == "failed step":
        assert [type(event) for event in core.fail_all(RuntimeError("boom")).events] == [Failed, Admitted]
        start(core, JobId(2))
    elif how.startswith("cancelled"):
        core.end(JobId(1))
    events = start_admitted(core)
    assert Computed(JobId(2), 37, GeneratedToken(37)) in events
    core.end(JobId(1))
    core.end(JobId(2))
    drain(core)
    counts = core.pool.counts()
    assert (counts.held, counts.reserved) == (0, 0)


def test_nobody_waits_for_a_much_longer_prompt() -> None:
    """It might wait long: shorter ones go before the longer. So the first 16 tokens are computed twice."""
    core = make_core(budget=16)
    core.submit(JobId(1), make_sequence(120))
    core.submit(JobId(2), make_sequence(20))
    assert [event.job_id for event in core.step().events] == [1, 2]


def test_two_of_the_same_prompt_at_once_end_with_one_copy_cached() -> None:
    core = make_core()
    core.submit(JobId(1), make_sequence(40))
    core.submit(JobId(2), make_sequence(40))
    start_admitted(core)
    assert core.runner.chunks == [[40], [8]]  # type: ignore[attr-defined]
    core.end(JobId(1))
    core.end(JobId(2))
    drain(core)
    assert core.pool.counts() == BlockCounts(total=16, free=14, reserved=0, held=0, cached=2)


def test_a_failed_step_fails_what_computes_and_spares_the_rest() -> None:
    core = make_core(budget=16, max_prefills=3)
    for job in (1, 2, 3):
        core.submit(JobId(job), make_sequence(16, first=job * 100))
    start(core, JobId(1))
    drain(core)  # computed; its blocks are being sent
    start(core, JobId(2))
    core.runner.error = RuntimeError("logits are NaN")  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError):
        core.step()
    events = core.fail_all(RuntimeError("logits are NaN")).events
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.job_id for event in failed] == [2]
    assert "logits are NaN" in failed[0].error.message
    core.runner.error = None  # type: ignore[attr-defined]
    start(core, JobId(3))
    assert drain(core)[-1] == Computed(JobId(3), 16, GeneratedToken(16))
    for job in (1, 2, 3):
        core.end(JobId(job))
    drain(core)
    assert core.pool.counts() == BlockCounts(total=16, free=14, reserved=0, held=0, cached=2)


def test_bad_logits_fail_their_own_job_and_leave_nothing_of_it_to_be_found() -> None:
    """Its first chunks were shareable by then."""
    core = make_core(budget=32)
    core.runner.bad_lengths = {50}  # type: ignore[attr-defined]
    for job, num_tokens in ((1, 50), (2, 40)):
        core.submit(JobId(job), make_sequence(num_tokens, first=job * 100))
        start(core, JobId(job))
    events = drain(core)
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert failed.job_id == 1
    assert isinstance(failed.error, BadLogitsError)
    assert Computed(JobId(2), 40, GeneratedToken(40)) in events
    assert core.pool.match(make_sequence(50, first=100).block_hashes) == []
    assert len(core.pool.match(make_sequence(40, first=200).block_hashes)) == 2
    for job in (1, 2):
        core.end(JobId(job))
    drain(core)
    assert core.pool.counts() == BlockCounts(total=16, free=14, reserved=0, held=0, cached=2)


def test_a_cached_block_can_be_read_until_it_is_evicted() -> None:
    core = make_core(num_blocks=1)
    block_hash = make_sequence(16).block_hashes[0]
    assert core.read(block_hash) is None
    run_prompt(core, 1, 16)
    assert core.read(block_hash) == b"slab of block 0"
    run_prompt(core, 2, 16, first=500)
    assert core.read(block_hash) is None


def test_a_partly_computed_block_cannot_be_read() -> None:
    """So the offloader, which reads by hash, never ships one: 20, 40, then all of 50 tokens are computed."""
    core = make_core(budget=20)
    core.submit(JobId(1), make_sequence(50))
    start(core, JobId(1))
    readable = []
    for _ in range(3):
        core.step()
        readable.append([core.read(block_hash) is not None for block_hash in make_sequence(50).block_hashes])
    assert readable == [[True, False, False], [True, True, False], [True, True, True]]
    core.end(JobId(1))
    drain(core)


def test_what_is_computed_and_what_is_loaded_meet_and_neither_is_done_twice() -> None:
    """Of 9 blocks the first 2 are computed by the first step; then the last 4 have come, and 3 more are computed."""
    core = make_core(budget=32)
    core.submit(JobId(1), make_sequence(150))
    meeting = Meeting(0, 9)
    core.start(JobId(1), meeting)
    core.step()
    written: list[int] = []
    for _ in range(4):
        assert meeting.load(written.append)
    assert drain(core)[-1] == Computed(JobId(1), 150, GeneratedToken(150))
    assert written == [8, 7, 6, 5]
    assert not meeting.load(written.append)
    assert core.runner.chunks == [[32], [32], [16], [6]]  # type: ignore[attr-defined]
    core.end(JobId(1))
    drain(core)
    assert core.pool.counts().cached == 9


def test_blocks_that_come_too_late_are_not_written() -> None:
    core = make_core(budget=64)
    core.submit(JobId(1), make_sequence(70))
    meeting = Meeting(0, 4)
    core.start(JobId(1), meeting)
    core.step()
    assert meeting.is_met
    assert not meeting.load(lambda index: pytest.fail(f"block {index} is the engine's"))
    core.end(JobId(1))
    drain(core)


def test_a_block_held_by_nobody_is_found_when_idle() -> None:
    core = make_core()
    core.pool.reserve(ReservationId("nobody"), [], 1)
    core.pool.commit(ReservationId("nobody"))
    with pytest.raises(PoolCorruptError, match="1 blocks are held"):
        core.check_idle()


def test_steps_get_shorter_while_newcomers_wait_for_them() -> None:
    now = 0.0
    core = make_core(num_blocks=64)
    core.clock = lambda: now
    core.scheduler = PrefillScheduler(core.scheduler.limits, AdaptiveBound(QueueMarks(0.03, 0.1), least=32))
    core.submit(JobId(1), make_sequence(700))
    start(core, JobId(1))
    assert core.step().step_tokens == 512
    asked_at, now = now, 1.0
    core.came(asked_at)
    assert core.report().step_tokens == 384
    drain(core)
    assert core.runner.chunks == [[512], [188]]  # type: ignore[attr-defined]


class CoreMachine(RuleBasedStateMachine):
    """Any order of commands, steps, blocks that are loaded meanwhile and changes of limits: the books balance, no step
    is over its budget, every first token is the reference's, and once nothing more comes everybody is served and
    nothing is held."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SlotCache(10, BLOCK_TOKENS)
        self.runner = SlotRunner(self.cache)
        self.limits = PrefillLimits(24, 24, max_prefills=3, max_waiting=3)
        self.core = PrefillCore(
            self.runner, BlockPool(10), PrefillScheduler(self.limits), self.cache.read_slab, BLOCK_TOKENS
        )
        self.next_job = 0
        self.admitted: dict[JobId, Admitted] = {}
        self.loading: dict[JobId, tuple[Meeting, Admitted]] = {}
        self.alive: dict[JobId, Sequence] = {}
        self.computed: set[JobId] = set()

    @rule(num_tokens=st.integers(1, 150), family=st.integers(0, 1))
    def submit(self, num_tokens: int, family: int) -> None:
        self.next_job += 1
        sequence = make_sequence(num_tokens, first=family * 1_000)
        try:
            self.core.submit(JobId(self.next_job), sequence)
        except OverloadedError:
            assert self.core.scheduler.num_slots_free == 0
        else:
            self.alive[JobId(self.next_job)] = sequence

    @rule()
    def step(self) -> None:
        num_steps = len(self.runner.batches)
        for event in self.core.step().events:
            if event.job_id not in self.alive:
                continue
            if isinstance(event, Admitted):
                self.admitted[event.job_id] = event
            elif isinstance(event, Computed) and event.token is not None:
                assert event.token.token_id == draw(self.alive[event.job_id].token_ids, seed=0)
                self.computed.add(event.job_id)
        for rows in self.runner.batches[num_steps:]:
            assert sum(rows) <= self.limits.max_batched_tokens
            assert max(rows) <= self.limits.chunk_tokens

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.admitted)))
        most = self.alive[job_id].num_reusable_blocks - self.admitted[job_id].num_cached_blocks
        num_held = data.draw(st.integers(0, most))
        self.begin(job_id, num_held, data.draw(st.integers(0, num_held)))

    def begin(self, job_id: JobId, num_held: int, num_loaded: int) -> None:
        """As if the kvstore had `num_held` more blocks of the prompt, and had given the last `num_loaded` so far."""
        admitted = self.admitted.pop(job_id)
        first = admitted.num_cached_blocks
        meeting = Meeting(first, first + num_held)
        self.loading[job_id] = meeting, admitted
        for _ in range(num_loaded):
            assert self.load_one(job_id)
        self.core.start(job_id, meeting)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        self.load_one(data.draw(st.sampled_from(sorted(self.loading))))

    def load_one(self, job_id: JobId) -> bool:
        (meeting, admitted), sequence = self.loading[job_id], self.alive[job_id]

        def write(index: int) -> None:
            tokens = sequence.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            slot = admitted.block_ids[index] * BLOCK_TOKENS
            self.cache.slots[slot : slot + BLOCK_TOKENS] = tokens

        return meeting.load(write)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_job(data.draw(st.sampled_from(sorted(self.alive))))

    def end_job(self, job_id: JobId) -> None:
        del self.alive[job_id]
        self.admitted.pop(job_id, None)
        self.loading.pop(job_id, None)
        self.core.end(job_id)

    @rule(budget=st.integers(1, 64), chunk=st.integers(1, 64), places=st.integers(1, 3), waiting=st.integers(0, 3))
    def change_limits(self, budget: int, chunk: int, places: int, waiting: int) -> None:
        self.limits = PrefillLimits(budget, chunk, places, waiting)
        self.core.set_limits(self.limits)

    @invariant()
    def books_balance(self) -> None:
        self.core.check_idle()

    def teardown(self) -> None:
        """A pool of 10 blocks holds any one prompt, so everybody's turn comes as others end."""
        for _ in range(3_000):
            if not self.alive:
                break
            self.step()
            for job_id in sorted(self.admitted):
                self.begin(job_id, 0, 0)
            for job_id in self.computed & self.alive.keys():
                self.end_job(job_id)
        assert not self.alive, "nobody starves"
        drain(self.core)
        counts = self.core.pool.counts()
        assert (counts.held, counts.reserved) == (0, 0)


TestAnyOrder = CoreMachine.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
