from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block import StoredBlock
from kvstore.memory import SLACK_BYTES, MemoryTier, Resident
from kvstore.quotas import Quotas
from tests.support.store_blocks import SLAB_BYTES, block_of, chain_of, info_of, key_of


def add(tier: MemoryTier, *numbers: int, num_bytes: int = SLAB_BYTES, tenant: str = "default") -> list[bool]:
    return [tier.add(info_of(number, tenant=tenant), block_of(number, num_bytes), 0.0) for number in numbers]


def payload(tier: MemoryTier, number: int) -> bytes:
    resident = tier.get(key_of(number))
    assert resident is not None
    return bytes(resident.block.payload)


def test_a_block_is_copied_so_that_its_message_may_go() -> None:
    tier = MemoryTier(10 * SLAB_BYTES)
    message = bytearray(block_of(1).payload)
    assert tier.add(info_of(1), StoredBlock(memoryview(message), block_of(1).checksum), 0.0)
    message[:] = bytes(SLAB_BYTES)
    assert payload(tier, 1) == block_of(1).payload
    tier.check()


def test_an_evicted_block_keeps_its_bytes_for_who_still_sends_them() -> None:
    """KS-01: a buffer that is used again while a slow reader has it would show it another request's KV."""
    tier = MemoryTier(2 * SLAB_BYTES)
    add(tier, 1, 2)
    held = tier.get(key_of(1))
    assert held is not None
    assert add(tier, 3, 4, 5, 6) == [True] * 4
    assert key_of(1) not in tier
    held.block.verify()
    assert held.block.payload == block_of(1).payload
    tier.check()


def test_what_nobody_looks_at_is_used_again_and_the_slack_is_not() -> None:
    tier = MemoryTier(4 * SLAB_BYTES)
    assert all(add(tier, *range(1_000)))
    highest = max(tier._keys)
    assert highest < 6 * SLAB_BYTES
    tier.check()


def test_readers_that_never_end_cost_a_refusal_not_memory_without_end() -> None:
    num_bytes = 8 << 20
    tier = MemoryTier(2 * num_bytes)
    held: list[Resident | None] = []
    for number in range(20):
        add(tier, number, num_bytes=num_bytes)
        held.append(tier.get(key_of(number)))
    assert tier.num_refused == 20 - (2 * num_bytes + SLACK_BYTES) // num_bytes
    held.clear()
    assert add(tier, 100, num_bytes=num_bytes) == [True]
    tier.check()


def test_a_tenant_over_its_quota_loses_its_own() -> None:
    tier = MemoryTier(6 * SLAB_BYTES, Quotas(0, {"small": 2 * SLAB_BYTES}))
    add(tier, 1, 2, tenant="large")
    assert add(tier, 11, 12, 13, tenant="small") == [True] * 3
    assert key_of(1) in tier
    assert key_of(2) in tier
    assert tier.index.used_by("small") == 2 * SLAB_BYTES


def test_pinned_blocks_stay_and_what_they_leave_no_room_for_is_refused() -> None:
    tier = MemoryTier(3 * SLAB_BYTES)
    for info, number in zip(chain_of(1, 2, 3), (1, 2, 3), strict=True):
        tier.add(info, block_of(number), 0.0)
    tier.index.pin([key_of(3)], 60.0)
    assert add(tier, 9) == [False]
    assert tier.num_refused == 1
    assert tier.add(info_of(9), block_of(9), 61.0)
    assert key_of(3) not in tier


def test_the_evicted_are_shown_before_they_go() -> None:
    tier, seen = MemoryTier(2 * SLAB_BYTES), []
    tier.on_evicted = lambda resident: seen.append((resident.info.key, bytes(resident.block.payload)))
    add(tier, 1, 2, 3)
    assert seen == [(key_of(1), block_of(1).payload)]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([700, 3_000, 8_000, 20_000])), max_size=60))
def test_slabs_of_several_sizes_live_together(steps: list[tuple[int, int]]) -> None:
    tier, sizes = MemoryTier(50_000), dict[int, int]()
    tier._arena.__init__(50_000)  # type: ignore[misc]  # without the slack, so that places run short
    for number, num_bytes in steps:
        if key_of(number) not in tier:
            sizes[number] = num_bytes
        assert tier.add(info_of(number), block_of(number, num_bytes), 0.0)
        for resident in map(tier.get, list(tier.index)):
            assert resident is not None
            resident.block.verify()
        del resident  # a view that is kept would keep its place
        assert payload(tier, number) == block_of(number, sizes[number]).payload
        tier.check()
