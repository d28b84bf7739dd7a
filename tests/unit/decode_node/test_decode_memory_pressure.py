"""When blocks run out: who gives way, who comes back when, and that no answer changes for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode_node.admission import fork_request
from decode_node.engine import BlocksWanted, DecodeCore, StepDone
from decode_node.memory import SequenceMemory
from decode_node.resume import Resume, ResumeCosts
from decode_node.scheduler import Restored, Scheduler
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import NotFoundError, OverloadedError
from kvrelay.kv.pool import BlockPool
from kvrelay.limits import DecodeLimits
from kvrelay.messages import NodeRequest
from kvrelay.types import BlockCounts, BlockHash, ReservationId
from tests.support.fake_engine import LAYOUT, make_info, make_request
from tests.support.slot_engine import SlotCache, SlotRunner, draw, reference_answer

ROOT = BlockHash(bytes(32))
SIZE = LAYOUT.block_tokens
A, B, C, D = (ReservationId(name) for name in "abcd")


@dataclass
class Answer:
    request: NodeRequest
    token_ids: list[int] = field(default_factory=list)
    ended: bool = False


class ToldCosts(ResumeCosts):
    """Chooses what a test says."""

    resume = Resume.RECOMPUTE

    def choose(self) -> Resume:
        return self.resume


class Engine:
    """A core with little memory, and what a node does around it."""

    def __init__(self, num_blocks: int = 8, max_batch: int = 4, max_batched_tokens: int = 8, reserve: int = 1) -> None:
        self.costs = ToldCosts(LAYOUT, with_store=True)
        self.to_load: list[BlocksWanted] = []
        self.pool, self.cache = BlockPool(num_blocks), SlotCache(num_blocks, SIZE)
        self.runner = SlotRunner(self.cache)
        self.limits = DecodeLimits(max_batch, max_batched_tokens, reserve_output_tokens=reserve)
        self.core = DecodeCore(
            info=make_info(max_model_len=1_000),
            runner=self.runner,
            cache=self.cache,
            pool=self.pool,
            scheduler=Scheduler(self.limits),
            costs=self.costs,
        )
        self.answers: dict[ReservationId, Answer] = {}
        self.sequences: dict[ReservationId, Sequence] = {}
        self.preempted: list[ReservationId] = []

    def reserve(self, name: ReservationId, request: NodeRequest) -> None:
        sequence = Sequence.create(request, ROOT, SIZE)
        most = request.num_prompt_tokens + (request.sampling.max_tokens or 0)
        num_blocks = LAYOUT.blocks_for(self.limits.num_reserved(sequence.num_tokens, most))
        reserved = self.core.reserve(name, tuple(sequence.block_hashes[: sequence.num_reusable_blocks]), num_blocks)
        sequence.num_computed_tokens = SIZE * reserved.num_cached
        sequence.num_registered_blocks = reserved.num_cached
        self.reserved_ids = reserved.block_ids
        self.sequences[name], self.answers[name] = sequence, Answer(request, list(request.token_ids[most:]))

    def hand_over(self, name: ReservationId, *, run: bool = True) -> None:
        """As if a prefill node had sent it all: into the blocks of the reservation that are not shared."""
        sequence, answer = self.sequences[name], self.answers[name]
        reservation = self.pool._reservations[name]
        for position in range(sequence.num_computed_tokens, sequence.num_tokens):
            slot = reservation.block_ids[position // SIZE] * SIZE + position % SIZE
            self.cache.slots[slot] = sequence.token_ids[position]
        first = draw(sequence.token_ids, answer.request.sampling.seed or 0)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.append(first)
        answer.token_ids.append(first)
        answer.ended = answer.request.sampling.max_tokens == 1
        self.core.commit(name, sequence, run=run, finished=answer.ended)

    def compute(self, name: ReservationId) -> None:
        self.core.compute(name, self.sequences[name])

    def fork(self, parent: ReservationId, name: ReservationId, index: int) -> None:
        request = fork_request(self.answers[parent].request, index)
        sequence = Sequence.create(request, ROOT, SIZE)
        num_tokens = request.num_prompt_tokens + (request.sampling.max_tokens or 0)
        num_blocks = LAYOUT.blocks_for(self.limits.num_reserved(request.num_prompt_tokens, num_tokens))
        self.core.fork(parent, name, sequence, num_blocks)
        self.sequences[name], self.answers[name] = sequence, Answer(request)

    def step(self) -> StepDone:
        done = self.core.step()
        for advanced in done.advanced:
            assert advanced.error is None
            answer = self.answers[advanced.reservation_id]
            assert not answer.ended, "nothing comes after the end"
            if advanced.token is not None:
                answer.token_ids.append(advanced.token.token_id)
            answer.ended = advanced.finished is not None
        self.preempted += [preempted.reservation_id for preempted in done.preempted]
        self.to_load += done.to_load
        self.pool.check()
        return done

    def load(self, wanted: BlocksWanted, num_blocks: int) -> None:
        """As if the kvstore had the first `num_blocks` of the blocks that are wanted."""
        sequence = self.sequences[wanted.reservation_id]
        for block_hash, block_id in list(zip(wanted.hashes, wanted.block_ids, strict=True))[:num_blocks]:
            index = sequence.block_hashes.index(block_hash)
            tokens = sequence.token_ids[index * SIZE : (index + 1) * SIZE]
            self.cache.slots[block_id * SIZE : (block_id + 1) * SIZE] = tokens
        self.to_load.remove(wanted)
        self.core.loaded(wanted.reservation_id, num_blocks, 0.1)

    def run_to_end(self, most_steps: int = 10_000) -> int:
        """Steps until no work is left."""
        num_steps = 0
        while self.core.has_work():
            self.step()
            num_steps += 1
            assert num_steps < most_steps, "no end in sight"
        return num_steps

    def check_answers(self) -> None:
        for name, answer in self.answers.items():
            expected = reference_answer(answer.request)
            assert answer.token_ids == expected[: len(answer.token_ids)], name
            assert not answer.ended or len(answer.token_ids) == len(expected), name

    def counts(self) -> BlockCounts:
        self.pool.check()
        return self.pool.counts()


def request(num_prompt: int, max_tokens: int, first: int = 10, seed: int = 0) -> NodeRequest:
    return make_request(tuple(range(first, first + num_prompt)), max_tokens, temperature=0.8, seed=seed)


def start(engine: Engine, *requests: NodeRequest) -> list[ReservationId]:
    names = [A, B, C, D][: len(requests)]
    for name, one in zip(names, requests, strict=True):
        engine.reserve(name, one)
    for name in names:
        engine.hand_over(name)
    return names


def test_answers_grow_block_by_block_and_evict_what_is_cached() -> None:
    engine = Engine(num_blocks=4)
    start(engine, request(6, 3))
    engine.run_to_end()
    assert engine.counts() == BlockCounts(total=4, free=2, cached=2)
    engine.reserve(B, request(4, 12, first=60))
    assert engine.counts() == BlockCounts(total=4, reserved=2, cached=2)
    engine.hand_over(B)
    engine.run_to_end()
    assert engine.answers[B].token_ids == reference_answer(request(4, 12, first=60))
    assert engine.pool.num_evictions == 2
    assert engine.preempted == []


def test_the_youngest_gives_way_and_comes_back_when_its_kv_and_a_block_more_fit() -> None:
    """Three of 2 blocks each and one of 2 fill 8 blocks; each wants 4 in the end."""
    engine = Engine(num_blocks=8, max_batched_tokens=32)
    start(engine, *(request(6, 10, first=10 + 20 * i) for i in range(4)))
    waiting = []
    while not all(answer.ended for answer in engine.answers.values()):
        engine.step()
        waiting.append(engine.core.load.num_waiting)
        if engine.core.load.num_waiting and not engine.answers[A].ended:
            assert not engine.answers[D].ended
    assert engine.preempted[0] == D
    assert A not in engine.preempted, "the oldest is nobody's victim"
    assert max(waiting) == 2  # 4 + 4 blocks are two answers at their longest
    engine.check_answers()
    assert engine.counts().held == 0


def test_one_that_was_preempted_is_not_picked_again_in_the_same_pass() -> None:
    engine = Engine(num_blocks=5, max_batched_tokens=32)
    start(engine, request(6, 14), request(6, 14, first=60))
    while not engine.preempted:
        engine.step()
    assert engine.preempted == [B]
    assert (engine.core.load.num_running, engine.core.load.num_waiting) == (1, 1)
    engine.step()
    assert engine.preempted == [B], "and it stays away while there is no room for it"
    engine.run_to_end()
    engine.check_answers()


def test_what_the_cache_still_has_of_a_preempted_sequence_is_not_computed_again() -> None:
    """B has two full blocks when it gives way; nobody needs them before A ends, so it goes on where it was."""
    engine = Engine(num_blocks=5, max_batched_tokens=32)
    start(engine, request(4, 9), request(4, 16, first=60))
    engine.run_to_end()
    engine.check_answers()
    assert engine.preempted == [B]
    assert engine.runner.num_computed == (9 - 1) + (16 - 1), "each position once; the first tokens came by handoff"


def test_what_was_evicted_meanwhile_is_computed_again_from_the_tokens() -> None:
    """A takes B's blocks one by one; B, with 10 tokens, then has to compute all of them, its own output included."""
    engine = Engine(num_blocks=5, max_batched_tokens=32)
    start(engine, request(4, 17), request(4, 12, first=60))
    engine.run_to_end()
    engine.check_answers()
    assert engine.preempted == [B]
    assert engine.answers[B].ended
    assert engine.runner.num_computed == (17 - 1) + (12 - 1) + 8
    assert [8 + 1] in engine.runner.batches, "in one chunk"


def test_nothing_new_is_let_in_while_a_preempted_one_waits() -> None:
    engine = Engine(num_blocks=5)
    start(engine, request(6, 14), request(6, 14, first=60))
    while not engine.preempted:
        engine.step()
    with pytest.raises(OverloadedError, match="preempted requests wait"):
        engine.reserve(C, request(1, 1))
    engine.run_to_end()
    engine.reserve(C, request(1, 1))


def test_a_waiting_one_that_has_its_blocks_passes_one_that_has_none() -> None:
    """B was preempted and needs more than is free; C's handoff came meanwhile. C runs to its end, then B."""
    engine = Engine(num_blocks=8, max_batched_tokens=32)
    engine.reserve(A, request(6, 14))
    engine.reserve(B, request(6, 14, first=40))
    engine.reserve(C, request(10, 3, first=70))
    engine.hand_over(A)
    engine.hand_over(B)
    while not engine.preempted:
        engine.step()
    assert engine.preempted == [B]
    engine.hand_over(C)
    while not engine.answers[C].ended:
        engine.step()
        assert engine.core.load.num_running > 0
    assert not engine.answers[B].ended
    engine.run_to_end()
    engine.check_answers()
    assert all(answer.ended for answer in engine.answers.values())


def test_one_alone_that_reservations_leave_no_block_sits_out_and_goes_on_when_one_ends() -> None:
    engine = Engine(num_blocks=4)
    engine.reserve(A, request(6, 10))
    engine.reserve(B, request(6, 10, first=60))
    engine.hand_over(A)
    engine.run_to_end()
    assert not engine.core.has_work(), "the engine sleeps rather than turn in circles"
    assert len(engine.answers[A].token_ids) == 3  # positions 6 and 7 are written; the next needs a block
    engine.core.release(B)
    engine.run_to_end()
    assert engine.answers[A].ended
    assert engine.preempted == []
    del engine.answers[B]
    engine.check_answers()


def test_one_alone_takes_the_blocks_of_a_reservation_that_joins_after_it() -> None:
    engine = Engine(num_blocks=4)
    engine.reserve(A, request(6, 10))
    engine.reserve(B, request(6, 10, first=60))
    engine.hand_over(A)
    engine.run_to_end()
    engine.hand_over(B)
    engine.run_to_end()
    assert engine.preempted[0] == B
    assert all(answer.ended for answer in engine.answers.values())
    engine.check_answers()


def test_a_prompt_that_is_computed_here_may_be_preempted_in_its_midst() -> None:
    engine = Engine(num_blocks=9, max_batched_tokens=4)
    start(engine, request(6, 20))
    engine.reserve(B, request(18, 5, first=40))
    engine.compute(B)
    engine.run_to_end()
    assert engine.preempted
    assert set(engine.preempted) == {B}
    engine.check_answers()
    assert engine.answers[B].ended


@pytest.mark.parametrize("num_loaded", [0, 1, 2])
def test_a_preempted_one_may_come_back_by_the_store_and_computes_what_does_not_come(num_loaded: int) -> None:
    """B is restored once A has ended, with 10 tokens of which no block is left here; the engine sleeps meanwhile."""
    engine = Engine(num_blocks=5, max_batched_tokens=32)
    engine.costs.resume = Resume.SWAP
    start(engine, request(4, 17), request(4, 12, first=60))
    engine.run_to_end()
    assert engine.preempted == [B]
    (wanted,) = engine.to_load
    assert (wanted.reservation_id, wanted.hashes) == (B, tuple(engine.sequences[B].block_hashes[:2]))
    assert (engine.core.load.num_running, engine.core.load.num_waiting) == (0, 1)
    engine.load(wanted, num_loaded)
    engine.run_to_end()
    engine.check_answers()
    assert engine.answers[B].ended
    assert engine.runner.num_computed == (17 - 1) + (12 - 1) + 8 - num_loaded * SIZE


def test_a_step_that_fails_still_tells_whose_blocks_to_load() -> None:
    """A has ended, so C comes back in the very step that fails under B: else C would wait for its blocks for ever."""
    engine = Engine(num_blocks=8, max_batched_tokens=32)
    engine.costs.resume = Resume.SWAP
    start(engine, request(4, 12), request(4, 24, first=40), request(4, 12, first=70))

    def fail_as_blocks_are_wanted() -> None:
        if engine.core._scheduler._loading:
            raise MemoryError("no memory for a step")

    engine.runner.before_step = fail_as_blocks_are_wanted
    with pytest.raises(MemoryError):
        engine.run_to_end()
    done = engine.core.fail_all(MemoryError("no memory for a step"))
    assert [failed.reservation_id for failed in done.advanced] == [B]
    assert [wanted.reservation_id for wanted in done.to_load] == [C]
    engine.runner.before_step = lambda: None
    engine.to_load += done.to_load
    engine.load(done.to_load[0], 1)
    engine.run_to_end()
    assert engine.answers[C].ended
    assert engine.counts().held == 0
    assert engine.core.fail_all(MemoryError("again")) == StepDone(())


def test_one_that_is_cancelled_while_its_blocks_load_leaves_nothing() -> None:
    engine = Engine(num_blocks=5, max_batched_tokens=32)
    engine.costs.resume = Resume.SWAP
    start(engine, request(4, 17), request(4, 12, first=60))
    engine.run_to_end()
    engine.core.release(B)
    assert engine.counts().held == 0
    engine.load(engine.to_load[0], 1)  # word of it comes late
    assert not engine.core.has_work()
    assert engine.counts().held == 0


@pytest.mark.parametrize("num_prompt", [1, 4, 6, 8])
def test_forks_share_the_prompts_blocks_and_copy_only_what_they_write_to(num_prompt: int) -> None:
    engine = Engine(num_blocks=20, max_batch=4)
    start(engine, request(num_prompt, 6, seed=7))
    held = engine.counts().held
    num_own = LAYOUT.blocks_for(num_prompt + 1) - LAYOUT.blocks_for(num_prompt - 1)
    engine.fork(A, B, 1)
    engine.fork(A, C, 2)
    assert engine.counts().held == held + 2 * num_own, "no block of the prompt is doubled"
    assert engine.cache.num_copied == 0
    engine.core.run(B)
    engine.core.run(C)
    engine.run_to_end()
    engine.check_answers()
    assert engine.cache.num_copied == (2 if (num_prompt - 1) % SIZE else 0)
    texts = {tuple(answer.token_ids) for answer in engine.answers.values()}
    assert len(texts) == 3, "each draws by a seed of its own"


def test_the_last_holder_of_a_shared_block_writes_where_it_is() -> None:
    """The parent is gone before its fork runs, and its partial block has no name: nothing is left to copy for."""
    engine = Engine(num_blocks=20)
    start(engine, request(6, 6, seed=7))
    engine.fork(A, B, 1)
    engine.core.release(A)
    engine.core.run(B)
    engine.run_to_end()
    assert engine.cache.num_copied == 0
    assert engine.answers[B].token_ids == reference_answer(engine.answers[B].request)


def test_a_fork_of_what_is_not_here_is_refused_and_one_without_room_changes_nothing() -> None:
    engine = Engine(num_blocks=4)
    with pytest.raises(NotFoundError):
        engine.core.fork(A, B, Sequence.create(request(6, 6), ROOT, SIZE), 3)
    start(engine, request(6, 10))
    engine.pool.reserve(D, [], 2)
    before = engine.counts()
    with pytest.raises(OverloadedError):
        engine.fork(A, B, 1)
    assert engine.counts() == before


def test_others_run_while_the_blocks_of_a_preempted_one_are_loaded() -> None:
    engine = Engine(num_blocks=9, max_batched_tokens=32)
    engine.costs.resume = Resume.SWAP
    engine.reserve(A, request(4, 20))
    engine.reserve(B, request(4, 20, first=40))
    engine.reserve(C, request(10, 3, first=70))
    engine.hand_over(A)
    engine.hand_over(B)
    while not engine.to_load:
        engine.step()
    assert engine.preempted == [B]
    engine.hand_over(C)
    engine.run_to_end()
    assert engine.answers[C].ended
    assert not engine.answers[B].ended
    engine.load(engine.to_load[0], 1)
    engine.run_to_end()
    engine.check_answers()
    assert engine.answers[B].ended


def test_a_sequence_comes_back_only_with_a_block_to_spare_unless_it_never_needs_one() -> None:
    """Nine tokens are three blocks; it returns when four are free, or three if it will never fill a fourth."""
    pool, cache = BlockPool(8), SlotCache(8, SIZE)
    memory = SequenceMemory(pool, cache.copy_block, max_model_len=1_000)
    growing, nearly_done = (Sequence.create(request(9, most), ROOT, SIZE) for most in (20, 3))
    taken = pool.allocate(5)
    assert memory.restore(growing) is Restored.NO_ROOM
    assert growing.block_table == []
    assert memory.restore(nearly_done) is Restored.READY
    memory.drop(nearly_done)
    pool.release(taken[:1])
    assert memory.restore(growing) is Restored.READY
    assert len(growing.block_table) == 4


def test_after_any_mixture_of_endings_nearly_the_whole_pool_is_granted_at_once() -> None:
    """Thirty rounds of four requests that finish, leave at some step, fail, or are refused."""
    engine = Engine(num_blocks=20, max_batched_tokens=32)
    for number in range(30):
        engine.reserve(A, request(6 + number % 5, 30, first=10 + number))
        engine.reserve(B, request(20, 30, first=50))
        engine.reserve(C, request(10, 30, first=70 + number))
        with pytest.raises(OverloadedError):
            engine.reserve(D, request(76, 1))
        engine.hand_over(A)
        engine.compute(B)
        engine.hand_over(C, run=number % 3 > 0)
        for _ in range(number):
            if engine.core.has_work():
                engine.step()
        engine.core.release(C)
        if number % 2:
            engine.core.fail_all(RuntimeError("a step failed"))
        for name in (A, B):
            engine.core.release(name)
        assert (engine.counts().held, engine.counts().reserved) == (0, 0)
        engine.reserve(D, request(72, 4, first=200))
        assert engine.counts().reserved + engine.counts().held == 19
        engine.core.release(D)
    assert engine.preempted


def test_limits_change_between_steps_and_the_youngest_rest() -> None:
    engine = Engine(num_blocks=20, max_batch=4)
    start(engine, *(request(3, 8, first=10 + 20 * i) for i in range(4)))
    engine.step()
    engine.core.set_limits(DecodeLimits(max_batch=2, max_batched_tokens=2))
    engine.step()
    assert (engine.core.load.num_running, engine.core.load.num_waiting) == (2, 2)
    engine.core.set_limits(DecodeLimits(max_batch=3, max_batched_tokens=8))
    engine.step()
    assert (engine.core.load.num_running, engine.core.load.num_waiting) == (3, 1)
    assert engine.runner.batches == [[1] * 4, [1] * 2, [1] * 3]
    engine.run_to_end()
    engine.check_answers()
    assert engine.preempted == [], "who rests keeps its blocks"


def test_thirty_requests_on_eight_blocks_end_with_few_preemptions() -> None:
    """Prompts of 30 tokens and answers of 60, in blocks of 4 so that 45 hold two at their longest."""
    engine = Engine(num_blocks=45, max_batch=16, max_batched_tokens=64)
    waiting = [(ReservationId(str(i)), request(30, 60, first=100 * i)) for i in range(30)]
    num_steps = 0
    while waiting or engine.core.has_work():
        while waiting:
            try:
                engine.reserve(*waiting[0])
            except OverloadedError:
                break
            engine.hand_over(waiting.pop(0)[0])
        done = engine.step()
        num_steps += 1
        assert done.num_rows, "no step is idle"
    engine.check_answers()
    assert all(answer.ended for answer in engine.answers.values())
    assert len(engine.preempted) >= 1
    num_blocks_filled = 30 * -(-90 // SIZE)
    assert len(engine.preempted) < num_blocks_filled < 30 * 60
    assert num_steps < 30 * 60, "fewer steps than the answers would take one after another"


class PressureMachine(RuleBasedStateMachine):
    """Arrivals, lengths, cancels, forks, changes of limits and of reservation policy in any order, on little memory."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(num_blocks=9, max_batch=3, max_batched_tokens=6, reserve=2)
        self.pending: list[ReservationId] = []
        self.idle: list[ReservationId] = []
        self.alive: list[ReservationId] = []
        self.num_names = 0

    def name(self) -> ReservationId:
        self.num_names += 1
        return ReservationId(str(self.num_names))

    @rule(
        num_prompt=st.integers(1, 16), max_tokens=st.integers(1, 20), family=st.integers(0, 1), seed=st.integers(0, 2)
    )
    def reserve(self, num_prompt: int, max_tokens: int, family: int, seed: int) -> None:
        name = self.name()
        try:
            self.engine.reserve(name, request(num_prompt, max_tokens, first=10 + 50 * family, seed=seed))
        except OverloadedError:
            return
        self.pending.append(name)
        self.alive.append(name)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), how=st.sampled_from(["hand over", "hand over idle", "compute"]))
    def begin(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(self.pending))
        self.pending.remove(name)
        if how == "compute":
            self.engine.compute(name)
        else:
            self.engine.hand_over(name, run=how == "hand over")
            if how == "hand over idle":
                self.idle.append(name)

    @precondition(lambda self: self.idle)
    @rule()
    def run_idle(self) -> None:
        self.engine.core.run(self.idle.pop(0))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), index=st.integers(1, 3))
    def fork(self, data: st.DataObject, index: int) -> None:
        parent, name = data.draw(st.sampled_from(self.alive)), self.name()
        try:
            self.engine.fork(parent, name, index)
        except (OverloadedError, NotFoundError):
            return
        self.alive.append(name)
        self.engine.core.run(name)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.alive))
        self.alive.remove(name)
        for names in (self.pending, self.idle):
            if name in names:
                names.remove(name)
        self.engine.core.release(name)
        self.engine.to_load = [wanted for wanted in self.engine.to_load if wanted.reservation_id != name]

    @precondition(lambda self: self.engine.to_load)
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        wanted = data.draw(st.sampled_from(self.engine.to_load))
        self.engine.load(wanted, data.draw(st.integers(0, len(wanted.hashes))))

    @rule(resume=st.sampled_from(Resume))
    def change_resume(self, resume: Resume) -> None:
        self.engine.costs.resume = resume

    @rule(max_batch=st.integers(1, 4), more=st.integers(0, 6), reserve=st.sampled_from([0, 1, 3]))
    def change_limits(self, max_batch: int, more: int, reserve: int) -> None:
        self.engine.limits = DecodeLimits(max_batch, max_batch + more, reserve_output_tokens=reserve)
        self.engine.core.set_limits(self.engine.limits)

    @precondition(lambda self: self.engine.core.has_work())
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.engine.core.has_work():
                done = self.engine.step()
                assert done.num_tokens <= self.engine.limits.max_batched_tokens
                assert done.num_rows <= self.engine.limits.max_batch

    @invariant()
    def answers_are_right_so_far(self) -> None:
        self.engine.check_answers()
        self.engine.counts()

    def teardown(self) -> None:
        """What nobody begins is given up; all else ends by itself, in a bounded number of steps."""
        for name in self.pending:
            self.engine.core.release(name)
        for name in self.idle:
            self.engine.core.run(name)
        self.engine.run_to_end(most_steps=2_000)
        while self.engine.to_load:
            self.engine.load(self.engine.to_load[0], 0)
            self.engine.run_to_end(most_steps=2_000)
        ended = [name for name in self.alive if name not in self.pending]
        assert all(self.engine.answers[name].ended for name in ended)
        self.engine.check_answers()
        counts = self.engine.counts()
        assert (counts.held, counts.reserved) == (0, 0)


TestUnderPressure = PressureMachine.TestCase
TestUnderPressure.settings = settings(max_examples=80, stateful_step_count=40)
