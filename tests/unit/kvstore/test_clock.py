import pytest

from kvstore.clock import Clocks, StoreClock


class Machine:
    """Its clocks, each of which a test may set."""

    def __init__(self, boot_id: str = "boot-1") -> None:
        self.monotonic, self.since_boot, self.wall, self.boot_id = 50.0, 5_000.0, 1_700_000_000.0, boot_id

    def clocks(self) -> Clocks:
        return Clocks(lambda: self.monotonic, lambda: self.since_boot, lambda: self.wall, self.boot_id)

    def passes(self, seconds: float) -> None:
        self.monotonic += seconds
        self.since_boot += seconds
        self.wall += seconds


def unused_s(machine: Machine, mark: bytes, used_at_age_s: float) -> float:
    """How long ago a restarted process takes that use to be."""
    return machine.monotonic - StoreClock(machine.clocks(), mark).monotonic_of(used_at_age_s)


def test_a_new_directory_has_no_age() -> None:
    machine = Machine()
    clock = StoreClock(machine.clocks(), None)
    machine.passes(7)
    assert clock.age_of(machine.monotonic) == 7


@pytest.mark.parametrize("jump_s", [-3_600.0, 0.0, 3_600.0, 1e9])
def test_a_jump_of_the_wall_clock_while_it_runs_is_not_seen(jump_s: float) -> None:
    machine = Machine()
    clock = StoreClock(machine.clocks(), None)
    used = clock.age_of(machine.monotonic)
    machine.wall += jump_s
    machine.passes(4)
    assert unused_s(machine, clock.mark(), used) == 4


@pytest.mark.parametrize("jump_s", [-3_600.0, 0.0, 3_600.0])
def test_a_jump_while_it_is_down_is_not_seen_within_one_boot(jump_s: float) -> None:
    machine = Machine()
    clock = StoreClock(machine.clocks(), None)
    used, mark = clock.age_of(machine.monotonic), clock.mark()
    machine.passes(100)
    machine.wall += jump_s
    machine.monotonic = 3.0  # of another process; no two need agree
    assert unused_s(machine, mark, used) == 100


@pytest.mark.parametrize(("passed_s", "seen_s"), [(600.0, 600.0), (-3_600.0, 0.0)])
def test_between_boots_the_wall_clock_counts_if_it_went_forward(passed_s: float, seen_s: float) -> None:
    machine = Machine()
    clock = StoreClock(machine.clocks(), None)
    used, mark = clock.age_of(machine.monotonic), clock.mark()
    after = Machine("boot-2")
    after.since_boot = after.monotonic = 20.0
    after.wall = machine.wall + passed_s
    assert unused_s(after, mark, used) == seen_s


@pytest.mark.parametrize("boot_id", ["boot-1", ""])
def test_a_process_that_stands_still_while_it_reads_its_clocks_makes_nothing_younger(boot_id: str) -> None:
    """Else blocks of the process before would outlive those that are put now."""

    class Slow(Machine):
        def clocks(self) -> Clocks:
            return Clocks(
                lambda: self.read("monotonic"), lambda: self.read("since_boot"), lambda: self.read("wall"), boot_id
            )

        def read(self, name: str) -> float:
            value = float(getattr(self, name))
            self.passes(0.3)
            return value

    machine = Slow()
    clock = StoreClock(machine.clocks(), None)
    used_at = machine.monotonic
    mark = clock.mark()
    machine.passes(5)
    assert StoreClock(machine.clocks(), mark).monotonic_of(clock.age_of(used_at)) <= used_at


def test_without_a_boot_id_the_wall_clock_counts() -> None:
    machine = Machine("")
    mark = StoreClock(machine.clocks(), None).mark()
    machine.passes(10)
    machine.wall += 5
    assert unused_s(machine, mark, 0.0) == 15


@pytest.mark.parametrize("mark", [b"", b"[1, 2]", b'["a", 1, 2, "b"]', b'[NaN, 1, 2, "b"]', b"\xff"])
def test_a_mark_that_cannot_be_read_is_none(mark: bytes) -> None:
    machine = Machine()
    assert StoreClock(machine.clocks(), mark).age_of(machine.monotonic) == 0
