"""From the pools of nodes by their feeds and a stream that loses messages to the index: it knows what is there."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.prefix_index import ASK_AGAIN_S, GUESS_S, PrefixIndex
from kvrelay.cluster import CacheEvents
from kvrelay.errors import OverloadedError
from kvrelay.kv.pool import BlockPool
from kvrelay.pb import cluster_pb2
from kvrelay.rpc import convert_cluster
from kvrelay.types import BlockHash, BlockId, InstanceId, ReservationId

NUM_NODES = 3
POOL_BLOCKS = 6
PROMPTS = [
    [BlockHash(hashlib.sha256(f"{prompt[: end + 1]}".encode()).digest()) for end in range(len(prompt))]
    for prompt in ("abcd", "abef", "gh", "abcdij", "k")
]
UNIVERSE = sorted({block_hash for prompt in PROMPTS for block_hash in prompt})


class Node:
    """One process: a pool, requests that hold blocks of it, and a stream to the coordinator."""

    def __init__(self, instance_id: InstanceId) -> None:
        self.instance_id = instance_id
        self.pool = BlockPool(POOL_BLOCKS)
        self.feed = self.pool.named.open_feed(lambda: None, max_pending=4, max_message_hashes=2)
        self.running: list[list[BlockId]] = []
        self.on_the_way: list[CacheEvents] = []
        self.num_requests = 0

    def compute(self, prompt: list[BlockHash]) -> None:
        self.num_requests += 1
        reservation_id = ReservationId(f"{self.num_requests}")
        try:
            self.pool.reserve(reservation_id, prompt, len(prompt))
        except OverloadedError:
            return
        block_ids = self.pool.commit(reservation_id)
        for block_id, block_hash in zip(block_ids, prompt, strict=True):
            self.pool.register(block_id, block_hash)
        self.running.append(block_ids)


class Cluster(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.num_started = self.num_new = 0
        self.index = PrefixIndex(10_000)
        self.nodes = [self.started() for _ in range(NUM_NODES)]

    def started(self) -> Node:
        self.num_started += 1
        node = Node(InstanceId(f"node-{self.num_started}"))
        self.join(node)
        return node

    def join(self, node: Node) -> None:
        node.on_the_way.clear()
        node.feed.end()
        self.index.joined(node.instance_id, self.now)
        node.feed.begin()

    def deliver(self, node: Node, told: CacheEvents) -> None:
        wire = convert_cluster.cache_events_to_pb(told).SerializeToString()
        read = convert_cluster.cache_events_from_pb(cluster_pb2.CacheEvents.FromString(wire))
        if self.index.apply(node.instance_id, read, self.now):
            node.feed.begin()

    @rule(which=st.integers(0, NUM_NODES - 1), prompt=st.sampled_from(PROMPTS))
    def compute(self, which: int, prompt: list[BlockHash]) -> None:
        self.index.assigned(self.nodes[which].instance_id, prompt, self.now)
        self.nodes[which].compute(prompt)

    @rule(which=st.integers(0, NUM_NODES - 1), bad=st.booleans())
    def finish(self, which: int, bad: bool) -> None:
        node = self.nodes[which]
        if node.running:
            block_ids = node.running.pop(0)
            if bad:
                node.pool.disown(block_ids)
            node.pool.release(block_ids)

    @rule(which=st.integers(0, NUM_NODES - 1))
    def send(self, which: int) -> None:
        told = self.nodes[which].feed.take()
        if told is not None:
            self.nodes[which].on_the_way.append(told)

    @rule(which=st.integers(0, NUM_NODES - 1))
    def arrive(self, which: int) -> None:
        if self.nodes[which].on_the_way:
            self.deliver(self.nodes[which], self.nodes[which].on_the_way.pop(0))

    @rule(which=st.integers(0, NUM_NODES - 1))
    def lose(self, which: int) -> None:
        self.nodes[which].feed.take()

    @rule(which=st.integers(0, NUM_NODES - 1))
    def break_stream(self, which: int) -> None:
        self.join(self.nodes[which])

    @rule(which=st.integers(0, NUM_NODES - 1))
    def restart_node(self, which: int) -> None:
        self.index.forget(self.nodes[which].instance_id)
        self.nodes[which] = self.started()

    @precondition(lambda self: self.num_started < 40)
    @rule()
    def restart_coordinator(self) -> None:
        self.index = PrefixIndex(10_000)
        for node in self.nodes:
            self.join(node)

    @rule(seconds=st.sampled_from((0.1, ASK_AGAIN_S, GUESS_S)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def settle(self) -> None:
        """All that is on the way arrives, nothing is lost any more, and what was guessed is past."""
        for node in self.nodes:
            while node.running:
                node.pool.release(node.running.pop())
            node.compute([self.new_block()])  # what was lost last is missed when there is more to say
        self.now += 2 * ASK_AGAIN_S  # once would be a little less in floating point
        for node in self.nodes:
            for told in node.on_the_way:
                self.deliver(node, told)
            node.on_the_way.clear()
            while (news := node.feed.take()) is not None:
                self.deliver(node, news)
        self.now += GUESS_S
        for block_hash in UNIVERSE:
            there = {node.instance_id: 1 for node in self.nodes if node.pool.find(block_hash) is not None}
            assert self.index.match([block_hash], self.now) == there
        assert self.index.num_blocks == sum(len(node.pool.named) for node in self.nodes)

    def new_block(self) -> BlockHash:
        self.num_new += 1
        return BlockHash(hashlib.sha256(b"%d" % self.num_new).digest())

    @invariant()
    def no_strangers(self) -> None:
        if not hasattr(self, "nodes"):
            return
        names = {node.instance_id for node in self.nodes}
        for prompt in PROMPTS:
            assert set(self.index.match(prompt, self.now)) <= names
        for node in self.nodes:
            node.pool.check()


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
