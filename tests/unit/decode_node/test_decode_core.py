"""The engine's commands and steps, with a real pool and a runner that draws by rule."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_node.engine import DecodeCore, SequenceAdvanced, StepDone
from decode_node.scheduler import Scheduler
from decode_node.step_size import DecodeStepSize
from kvrelay.engine.batch import Batch
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import BadLogitsError, NotFoundError, OverloadedError
from kvrelay.kv.pool import BlockPool, Reservation
from kvrelay.limits import DecodeLimits, QueueMarks
from kvrelay.messages import DecodeFinished
from kvrelay.sampling import GeneratedToken
from kvrelay.types import BlockCounts, BlockHash, CachedTokens, FinishReason, ReservationId
from tests.support.fake_engine import FakeCache, FakeRunner, make_info, make_request
from tests.support.manual_clock import ManualClock

ROOT = BlockHash(bytes(32))
A, B = ReservationId("a"), ReservationId("b")


class Engine:
    """A core of 16 blocks, and what a node does around it."""

    def __init__(self, max_batch: int = 4, max_batched_tokens: int = 8, size: DecodeStepSize | None = None) -> None:
        self.pool, self.runner, self.cache, self.clock = BlockPool(16), FakeRunner(), FakeCache(), ManualClock(50.0)
        self.core = DecodeCore(
            info=make_info(),
            runner=self.runner,
            cache=self.cache,
            pool=self.pool,
            scheduler=Scheduler(DecodeLimits(max_batch, max_batched_tokens), size),
            clock=self.clock,
        )

    def reserve(self, reservation_id: ReservationId, num_prompt: int, max_tokens: int = 4) -> Sequence:
        sequence = Sequence.create(make_request(tuple(range(10, 10 + num_prompt)), max_tokens), ROOT, 4)
        reservation = self._reserve(reservation_id, sequence, -(-(num_prompt + max_tokens) // 4))
        sequence.num_computed_tokens = 4 * reservation.num_cached
        sequence.num_registered_blocks = reservation.num_cached
        return sequence

    def _reserve(self, reservation_id: ReservationId, sequence: Sequence, num_blocks: int) -> Reservation:
        prefix = tuple(sequence.block_hashes[: sequence.num_reusable_blocks])
        return self.core.reserve(reservation_id, prefix, num_blocks)

    def hand_over(self, reservation_id: ReservationId, sequence: Sequence, *, run: bool = True) -> None:
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.append(20)
        self.core.commit(reservation_id, sequence, run=run, finished=False)

    def run_to_end(self) -> list[SequenceAdvanced]:
        advanced: list[SequenceAdvanced] = []
        while self.core.has_work():
            advanced.extend(self.core.step().advanced)
        return advanced

    def counts(self) -> tuple[int, int, int, int]:
        self.pool.check()
        counts = self.pool.counts()
        assert self.core.load.blocks == counts, "the published load is the pool's"
        return (counts.free, counts.reserved, counts.held, counts.cached)


def test_a_handed_over_sequence_runs_to_its_end_and_leaves_its_full_blocks_cached() -> None:
    engine = Engine()
    sequence = engine.reserve(A, num_prompt=6, max_tokens=4)
    assert engine.counts() == (13, 3, 0, 0)
    engine.hand_over(A, sequence)
    assert engine.counts() == (13, 0, 3, 0)
    assert engine.run_to_end() == [
        SequenceAdvanced(A, GeneratedToken(21)),
        SequenceAdvanced(A, GeneratedToken(22)),
        SequenceAdvanced(A, GeneratedToken(23), DecodeFinished(FinishReason.LENGTH)),
    ]
    assert engine.counts() == (14, 0, 0, 2)  # 9 of 10 tokens were computed
    assert engine.pool.match(sequence.block_hashes) == engine.pool.match(sequence.block_hashes[:2])


def test_blocks_a_step_fills_are_reported_once_and_handed_over_ones_are_not() -> None:
    engine = Engine()
    sequence = engine.reserve(A, num_prompt=6, max_tokens=8)
    engine.hand_over(A, sequence)
    filled = [engine.core.step().filled for _ in range(7)]
    assert [len(f) for f in filled] == [0, 1, 0, 0, 0, 1, 0]
    assert [f[0].block_hash for f in filled if f] == sequence.block_hashes[1:3]


def test_a_cached_prefix_is_pinned_and_only_the_tail_is_computed() -> None:
    engine = Engine()
    engine.hand_over(A, engine.reserve(A, num_prompt=9))
    engine.run_to_end()
    engine.runner.batches.clear()
    sequence = engine.reserve(B, num_prompt=9)
    assert sequence.num_computed_tokens == 8
    engine.core.compute(B, sequence)
    engine.clock.now += 2.0
    advanced = engine.run_to_end()
    assert engine.runner.batches == [[1], [1], [1], [1]]
    assert [a.token.token_id for a in advanced if a.token] == [19, 20, 21, 22]
    assert advanced[-1].finished == DecodeFinished(FinishReason.LENGTH, CachedTokens(device=8), compute_s=2.0)
    assert engine.counts() == (12, 0, 0, 4)  # the first answer's third block, of other tokens, is there too


def test_a_long_tail_is_computed_in_chunks_beside_running_answers() -> None:
    engine = Engine(max_batched_tokens=8)
    engine.hand_over(A, engine.reserve(A, num_prompt=3, max_tokens=6))
    engine.core.compute(B, engine.reserve(B, num_prompt=17, max_tokens=2))
    steps = [engine.core.step() for _ in range(3)]
    assert engine.runner.batches == [[1, 7], [1, 7], [1, 3]]
    assert [[(a.reservation_id, a.token.token_id) for a in s.advanced if a.token] for s in steps] == [
        [(A, 21)],
        [(A, 22)],
        [(A, 23), (B, 27)],
    ]


def test_a_prompt_takes_no_more_of_a_step_beside_an_answer_than_the_high_mark_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token takes 5 ms; the first prompt, which nothing runs beside, is computed at once."""
    engine = Engine(max_batched_tokens=64, size=DecodeStepSize(QueueMarks(low_s=0.03, high_s=0.1)))
    run = engine.runner.run

    def take_time(batch: Batch) -> list[GeneratedToken | BadLogitsError | None]:
        engine.clock.now += 0.005 * batch.num_tokens
        return run(batch)

    monkeypatch.setattr(engine.runner, "run", take_time)
    engine.core.compute(A, engine.reserve(A, num_prompt=20, max_tokens=1))
    engine.run_to_end()
    engine.hand_over(A, engine.reserve(A, num_prompt=3, max_tokens=6))
    other = Sequence.create(make_request(tuple(range(100, 140)), 1), ROOT, 4)
    engine._reserve(B, other, 11)
    engine.core.compute(B, other)
    engine.run_to_end()
    assert engine.runner.batches[0] == [20]
    assert engine.runner.batches[1:4] == [[1, 19], [1, 17], [1, 4]]


def test_compute_time_is_from_joining_to_the_first_token() -> None:
    engine = Engine()
    engine.core.compute(A, engine.reserve(A, num_prompt=3, max_tokens=2))
    engine.clock.now += 1.5
    engine.core.step()
    engine.clock.now += 9.0
    (last,) = engine.core.step().advanced
    assert last.finished == DecodeFinished(FinishReason.LENGTH, CachedTokens(), compute_s=1.5)


def test_a_finished_first_token_holds_nothing_and_leaves_the_prompt_cached() -> None:
    engine = Engine()
    sequence = engine.reserve(A, num_prompt=6, max_tokens=1)
    sequence.num_computed_tokens = 6
    sequence.append(2)
    engine.core.commit(A, sequence, run=False, finished=True)
    assert not engine.core.has_work()
    assert engine.counts() == (15, 0, 0, 1)
    engine.core.release(A)
    assert engine.counts() == (15, 0, 0, 1)


def test_a_committed_sequence_runs_only_once_it_is_wanted() -> None:
    engine = Engine()
    engine.hand_over(A, engine.reserve(A, num_prompt=6), run=False)
    assert not engine.core.has_work()
    engine.core.run(A)
    assert len(engine.run_to_end()) == 3
    engine.core.run(A)
    assert not engine.core.has_work()


@pytest.mark.parametrize("stage", ["reserved", "committed", "waiting", "mid-prompt", "running", "finished", "unknown"])
def test_release_frees_everything_at_every_stage_and_twice_is_once(stage: str) -> None:
    engine = Engine(max_batch=1, max_batched_tokens=4)
    sequence = engine.reserve(A, num_prompt=9)
    if stage == "committed":
        engine.hand_over(A, sequence, run=False)
    elif stage == "waiting":
        engine.hand_over(A, sequence)
    elif stage == "mid-prompt":
        engine.core.compute(A, sequence)
        engine.core.step()
    elif stage == "running":
        engine.hand_over(A, sequence)
        engine.core.step()
    elif stage == "finished":
        engine.hand_over(A, sequence)
        engine.run_to_end()
    engine.core.release(A if stage != "unknown" else B)
    if stage == "unknown":
        engine.core.release(A)
    free, reserved, held, cached = engine.counts()
    assert (reserved, held, free + cached) == (0, 0, 16)
    assert not engine.core.has_work()
    engine.core.release(A)
    assert engine.counts() == (free, 0, 0, cached)


def test_a_commit_after_the_release_is_refused_and_takes_nothing() -> None:
    engine = Engine()
    sequence = engine.reserve(A, num_prompt=6)
    engine.core.release(A)
    with pytest.raises(NotFoundError, match="a does not exist or has ended"):
        engine.hand_over(A, sequence)
    with pytest.raises(NotFoundError, match="a does not exist or has ended"):
        engine.core.compute(A, sequence)
    assert engine.counts() == (16, 0, 0, 0)


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    engine = Engine()
    engine.reserve(A, num_prompt=40)
    with pytest.raises(OverloadedError):
        engine.reserve(B, num_prompt=40)
    engine.core.release(B)
    assert engine.counts() == (5, 11, 0, 0)


def test_a_failed_step_ends_its_sequences_and_spares_those_that_wait() -> None:
    engine = Engine(max_batch=1, max_batched_tokens=4)
    engine.hand_over(A, engine.reserve(A, num_prompt=6))
    engine.hand_over(B, engine.reserve(B, num_prompt=6))
    engine.core.step()
    done = engine.core.fail_all(RuntimeError("out of memory"))
    assert isinstance(done, StepDone)
    (failed,) = done.advanced
    assert failed.reservation_id == A
    assert str(failed.error) == "a decode step failed: out of memory"
    assert [a.reservation_id for a in engine.run_to_end()] == [B, B, B]
    assert engine.counts() == (14, 0, 0, 2)


def test_bad_logits_end_their_own_sequence_and_leave_nothing_of_it_to_be_found() -> None:
    """Its full blocks were shareable, and one of them is the other's; that goes on, and they are cached no more."""
    engine = Engine()
    doomed, other = engine.reserve(A, num_prompt=6), engine.reserve(B, num_prompt=9)
    engine.hand_over(A, doomed)
    engine.hand_over(B, other)
    engine.core.step()
    engine.runner.bad_after = {21}
    other.token_ids[-1] = 50
    bad, good = engine.core.step().advanced
    assert bad.reservation_id == A
    assert isinstance(bad.error, BadLogitsError)
    assert good == SequenceAdvanced(B, GeneratedToken(51))
    assert engine.pool.match(doomed.block_hashes) == []
    assert [a.reservation_id for a in engine.run_to_end()] == [B]
    engine.core.release(A)
    assert engine.counts()[1:3] == (0, 0)


def test_a_partly_filled_block_has_no_name_to_be_read_by() -> None:
    """What is offloaded is read by hash, and only full and computed blocks have one: 11 of these 12 positions are."""
    engine = Engine()
    sequence = engine.reserve(A, num_prompt=10)
    engine.hand_over(A, sequence)
    filled = engine.core.step().filled
    assert sequence.num_tokens == 12
    assert len(sequence.block_hashes) == 3
    assert filled == ()
    assert [engine.core.read_block(h) is not None for h in sequence.block_hashes] == [True, True, False]
    assert engine.core.step().filled == tuple(sequence.blocks_to_keep([2]))


def test_a_block_can_be_read_by_its_hash_while_it_is_here() -> None:
    engine = Engine()
    sequence = engine.reserve(A, num_prompt=6)
    engine.hand_over(A, sequence)
    block_hash = sequence.block_hashes[0]
    engine.cache.write_slab(sequence.block_table[0], b"k" * 256)
    assert engine.core.read_block(block_hash) == b"k" * 256
    assert engine.core.read_block(BlockHash(b"z" * 32)) is None


def test_the_published_load_counts_rows() -> None:
    engine = Engine(max_batch=1, max_batched_tokens=4)
    engine.hand_over(A, engine.reserve(A, num_prompt=6))
    engine.hand_over(B, engine.reserve(B, num_prompt=6))
    engine.core.step()
    assert (engine.core.load.num_running, engine.core.load.num_waiting) == (1, 1)
    assert engine.core.load.blocks == BlockCounts(total=16, free=11, held=5)  # they share one


COMMANDS = ["hand over", "hand over idle", "compute", "run", "release", "step", "fail", "reserve", "reserve", "step"]


@given(commands=st.lists(st.tuples(st.sampled_from(COMMANDS), st.integers(0, 7)), max_size=60))
def test_whatever_comes_in_whatever_order_nothing_is_lost_or_held_twice(commands: list[tuple[str, int]]) -> None:
    """Requests of overlapping prompts; each command picks one. The pool proves itself after every command."""
    engine = Engine(max_batch=2, max_batched_tokens=4)
    reserved: dict[ReservationId, Sequence] = {}
    names: list[ReservationId] = []
    idle: set[ReservationId] = set()
    for command, pick in commands:
        name = names[pick % len(names)] if names else A
        if command == "reserve" and len(names) < 12:
            name = ReservationId(str(len(names)))
            with contextlib.suppress(OverloadedError):
                reserved[name] = engine.reserve(name, num_prompt=2 + pick * 3, max_tokens=1 + pick)
                names.append(name)
        elif command.startswith("hand over") and name in reserved:
            engine.hand_over(name, reserved.pop(name), run="idle" not in command)
            if "idle" in command:
                idle.add(name)
        elif command == "compute" and name in reserved:
            engine.core.compute(name, reserved.pop(name))
        elif command == "run" and name in idle:
            idle.remove(name)
            engine.core.run(name)
        elif command == "release":
            reserved.pop(name, None)
            engine.core.release(name)
        elif command == "step" and engine.core.has_work():
            engine.core.step()
        elif command == "fail" and engine.core.has_work():
            engine.core.fail_all(RuntimeError("boom"))
        free, num_reserved, held, cached = engine.counts()
        assert free + num_reserved + held + cached == 16
    engine.run_to_end()
    for name in names:
        engine.core.release(name)
    assert engine.counts()[1:3] == (0, 0)
