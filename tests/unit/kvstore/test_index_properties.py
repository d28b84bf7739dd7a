"""Whatever is done to it, in whatever order: the books agree, bounds hold, chains have no holes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.block import BlockInfo
from kvstore.index import TierIndex
from kvstore.quotas import Quotas

CAPACITY = 60
QUOTA_OF_A = 25
# Two namespaces, chains that fork: key -> parent. "r" is a root, which is never stored.
PARENTS = {b"n1" + bytes([i]): (b"n1" + bytes([(i - 1) // 2]) if i else b"n1r") for i in range(12)} | {
    b"n2" + bytes([i]): (b"n2" + bytes([i - 1]) if i else b"n2r") for i in range(6)
}
DEPTHS: dict[bytes, int] = {}
for _key, _parent in PARENTS.items():
    DEPTHS[_key] = DEPTHS.get(_parent, -1) + 1
TTLS = st.sampled_from([0.0, 4.0, 30.0])
keys = st.sampled_from(sorted(PARENTS))
tenants = st.sampled_from(["a", "b", "c"])
sizes = st.integers(1, 20)


def chain_of(key: bytes) -> list[bytes]:
    chain = [key]
    while chain[-1] in PARENTS:
        chain.append(PARENTS[chain[-1]])
    return chain[-2::-1]


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = TierIndex(CAPACITY, Quotas(by_tenant={"a": QUOTA_OF_A}))
        self.now = 1000.0
        self.sizes: dict[bytes, int] = {}
        self.pinned_until: dict[bytes, float] = {}

    def joined(self, first: bytes, last: bytes) -> bool:
        """Whether every block from `first` to `last` is here."""
        chain = chain_of(last)
        return set(chain[chain.index(first) :]) <= self.sizes.keys()

    def protected(self) -> set[bytes]:
        pinned = [key for key, until in self.pinned_until.items() if until > self.now and key in self.sizes]
        return {each for key in pinned for each in chain_of(key) if self.joined(each, key)}

    def gone(self, dropped: list[bytes]) -> None:
        """They were here, each once, none before its followers."""
        for key in dropped:
            assert not [other for other in self.sizes if PARENTS[other] == key], "went before what follows it"
            del self.sizes[key]
            self.pinned_until.pop(key, None)

    @rule(key=keys, tenant=tenants, size=sizes, ttl_s=TTLS)
    def put(self, key: bytes, tenant: str, size: int, ttl_s: float) -> None:
        if key in self.sizes:
            return
        before, protected = dict(self.sizes), self.protected()
        keep = [PARENTS[key]]
        dropped = self.index.make_room(size, tenant, self.now, keep)
        if dropped is None:
            assert set(self.index) == set(before)
            return
        assert not protected & set(dropped)
        assert PARENTS[key] not in dropped
        self.gone(dropped)
        self.index.add(BlockInfo(key, PARENTS[key], DEPTHS[key], tenant, ttl_s), size, self.now)
        self.sizes[key] = size

    def draw_held(self, data: st.DataObject) -> bytes:
        return data.draw(st.sampled_from(sorted(self.sizes)))

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = self.draw_held(data)
        self.index.hit(chain_of(key), self.now)
        for each in chain_of(key):
            if each in self.sizes:
                assert self.index.last_used(each) == self.now

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        key = self.draw_held(data)
        dropped = self.index.discard(key)
        self.gone(dropped)
        assert all(key in chain_of(each) for each in dropped)
        assert key not in self.sizes

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        protected = self.protected()
        self.gone(dropped := self.index.expire(self.now))
        assert not protected & set(dropped)
        for key in set(self.sizes) - protected:
            info = self.index.info(key)
            if info.ttl_s and self.index.last_used(key) + info.ttl_s <= self.now:
                assert [other for other in self.sizes if PARENTS[other] == key], "expired, free, and still here"

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 2.0, 50.0]))
    def pin(self, data: st.DataObject, seconds: float) -> None:
        key = self.draw_held(data)
        assert self.index.pin([key, b"not here"], self.now + seconds) == 1
        self.pinned_until[key] = self.now + seconds

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), tenant=tenants, size=sizes)
    def put_again(self, data: st.DataObject, tenant: str, size: int) -> None:
        """Where it fits as it is; another tenant may be the one."""
        key = self.draw_held(data)
        used = self.index.used_by("a") - (self.sizes[key] if self.index.info(key).tenant == "a" else 0)
        fits = self.index.used_bytes - self.sizes[key] + size <= CAPACITY
        fits = fits and (tenant != "a" or used + size <= QUOTA_OF_A)
        try:
            self.index.add(BlockInfo(key, PARENTS[key], DEPTHS[key], tenant, 0.0), size, self.now)
        except ValueError:
            assert not fits
        else:
            assert fits
            self.sizes[key] = size

    @rule(key=keys, tenant=tenants, size=sizes, ttl_s=TTLS, age_s=st.sampled_from([0.0, 3.0, 40.0]))
    def restore(self, key: bytes, tenant: str, size: int, ttl_s: float, age_s: float) -> None:
        info = BlockInfo(key, PARENTS[key], DEPTHS[key], tenant, ttl_s)
        if self.index.restore(info, size, self.now - age_s, hits=2):
            assert key not in self.sizes
            self.sizes[key] = size

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        key = self.draw_held(data)
        selected = self.index.select(key=key, now=self.now)
        assert set(selected) == {k for k in self.sizes if key in chain_of(k) and self.joined(key, k)}
        assert [DEPTHS[k] for k in selected] == sorted((DEPTHS[k] for k in selected), reverse=True)

    @invariant()
    def the_books_agree(self) -> None:
        self.index.check()
        assert {key: self.index.num_bytes(key) for key in self.index} == self.sizes


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
