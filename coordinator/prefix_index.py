"""Which node has which blocks of prompts cached: what the nodes say, and for a moment what they are about to. Pure.

A node tells of every block that comes and goes, in numbered events; where a number is missing it is asked for all it
has. A request that was just sent to a node will be cached there, so its blocks count as held until the node tells, or
`GUESS_S` have passed: or else a burst of prompts that begin alike would be spread over all nodes. Of a node that tells
nothing, an older one, all is guessed, and nothing forgotten but for room. Times are monotonic seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from coordinator.holders import SHARD_SHIFT, Holders, keys_of
from coordinator.node_bits import NodeBits
from kvrelay.cluster import CacheCleared, CacheEvent, CacheEvents, CacheRemoved, CacheStored
from kvrelay.types import BlockHash, InstanceId

MAX_BLOCKS = 1_000_000
GUESS_S = 20.0
MAX_GUESSED_BLOCKS = 65_536
ASK_AGAIN_S = 1.0  # a node whose numbers go wrong again and again is not asked more often
_MIN_TRIMMED = 64  # blocks that go at a time: finding the node that has most takes a look at each
_TIDIED = 2  # blocks of nodes that are gone, tidied away for each one that is told or assigned


class _Node:
    """What is known of one process."""

    __slots__ = ("asked_at", "bit", "guessed", "held", "instance_id", "next_sequence", "tells")

    def __init__(self, instance_id: InstanceId, bit: int, now: float) -> None:
        self.instance_id = instance_id
        self.bit = bit
        self.held: dict[int, None] = {}  # the least recently stored or assigned first
        self.guessed: dict[int, float] = {}  # until when; the first to end first
        self.tells = False
        self.next_sequence: int | None = None  # None: nothing it says makes sense before it begins anew
        self.asked_at = now


class PrefixIndex:
    """Blocks of one role's nodes, `max_blocks` in all, each counted once for every node that has it.

    With more, the nodes that have most lose those that were stored or assigned longest ago, so every node keeps its
    even part of them at least; tails go before what they follow if they were told, or assigned, together.
    """

    def __init__(
        self, max_blocks: int = MAX_BLOCKS, on_given_up: Callable[[Sequence[int]], None] = lambda keys: None
    ) -> None:
        """`on_given_up` is told of keys that a node held and is not known to hold any more."""
        self._max_blocks = max_blocks
        self._on_given_up = on_given_up
        self._bits = NodeBits()
        self._nodes: dict[InstanceId, _Node] = {}
        self._live = 0  # the bits of those
        self._held = Holders()
        self._guessed = Holders()
        self._guesses: deque[tuple[float, _Node]] = deque()  # a request that was sent each: until when, and where
        self._gone: deque[tuple[int, dict[int, None]]] = deque()  # bits of the past, and what is still noted for them
        self.num_blocks = 0
        self.num_guessed = 0
        self.num_told = 0  # blocks that nodes told of, those that came and those that went
        self.num_dropped = 0  # for room
        self.num_clears = 0  # a node began to tell of all it has: it joined, was asked, or had too much to tell
        self.num_resyncs = 0  # it was asked since it lost count

    @property
    def num_noted(self) -> int:
        """Different blocks in memory, those of nodes that are gone and not yet tidied away included."""
        return len(self._held)

    def joined(self, instance_id: InstanceId, now: float) -> None:
        """A stream of this process begins, and with it the numbers; it is asked for all it has. What was known of it
        holds until it tells."""
        node = self._nodes.get(instance_id)
        if node is None:
            self._nodes[instance_id] = node = _Node(instance_id, self._take_bit(instance_id), now)
        node.next_sequence, node.asked_at = None, now

    def apply(self, instance_id: InstanceId, told: CacheEvents, now: float) -> bool:
        """Notes what a node told; whether it has to be asked for all it has, since something is missing."""
        node = self._nodes.get(instance_id)
        if node is None:
            return False
        events = _from_last_clear(told.events)
        if not isinstance(events[0], CacheCleared) and told.first_sequence != node.next_sequence:
            return self._lost_count(node, now)
        node.next_sequence = told.first_sequence + len(told.events)
        for event in events:
            self._apply(node, event)
        return False

    def assigned(self, instance_id: InstanceId, hashes: Sequence[BlockHash], now: float) -> None:
        """A prompt of these blocks was sent there."""
        node = self._nodes.get(instance_id)
        if node is None or not hashes:
            return
        keys = keys_of(hashes)
        keys.reverse()
        if node.tells:
            self._guess(node, keys, now)
        else:
            self._store(node, keys)
        for key in keys:
            if key in node.held:
                del node.held[key]
                node.held[key] = None

    def refused(self, instance_id: InstanceId, hashes: Sequence[BlockHash]) -> None:
        """A prompt of these blocks was sent there and not taken: they will not be cached there after all."""
        node = self._nodes.get(instance_id)
        if node is not None and hashes:
            self._drop_guesses(node, keys_of(hashes))

    def match(self, hashes: Sequence[BlockHash], now: float) -> dict[InstanceId, int]:
        """Leading blocks that each node has; nodes that have none are left out."""
        self._settle(now)
        matched: dict[InstanceId, int] = {}
        held, guessed = self._held.lookups, self._guessed.lookups if self.num_guessed else None
        alive, last, depth = self._live, -1, 0
        for key in keys_of(hashes):
            nodes = held[key >> SHARD_SHIFT](key, 0)
            if guessed is not None:
                nodes |= guessed[key >> SHARD_SHIFT](key, 0)
            if nodes is not last:  # most blocks are held by the same nodes as the one before
                last, still = nodes, alive & nodes
                if still != alive:
                    if depth:
                        matched.update(dict.fromkeys(self._bits.ids(alive), depth))
                    alive = still
                    if not alive:
                        return matched
            depth += 1
        if depth:
            matched.update(dict.fromkeys(self._bits.ids(alive), depth))
        return matched

    def is_held(self, key: int) -> bool:
        """Whether some node told that it has the block, by `holders.keys_of`; one that is gone since may count."""
        return bool(self._held.lookups[key >> SHARD_SHIFT](key, 0))

    def forget(self, instance_id: InstanceId) -> None:
        """The process is gone and its cache with it. At once, however much it had: the rest is tidied away later."""
        node = self._nodes.pop(instance_id, None)
        if node is not None:
            self._leave(node)

    def _apply(self, node: _Node, event: CacheEvent) -> None:
        match event:
            case CacheCleared():
                node.tells = True
                self.num_clears += 1
                self._leave(node)
                node.bit = self._take_bit(node.instance_id)
            case CacheStored(hashes):
                keys = keys_of(hashes)
                keys.reverse()
                self.num_told += len(keys)
                self._drop_guesses(node, keys)
                self._store(node, keys)
            case CacheRemoved(hashes):
                keys = keys_of(hashes)
                self.num_told += len(keys)
                self._drop_guesses(node, keys)
                gone = self._held.discard(keys, node.bit)
                self.num_blocks -= len(gone)
                for key in gone:
                    del node.held[key]
                self._on_given_up(gone)

    def _lost_count(self, node: _Node, now: float) -> bool:
        may_ask = node.next_sequence is not None or now - node.asked_at >= ASK_AGAIN_S
        node.next_sequence = None
        if may_ask:
            node.asked_at = now
            self.num_resyncs += 1
        return may_ask

    def _store(self, node: _Node, keys: Sequence[int]) -> None:
        new = self._held.add(keys, node.bit)
        node.held.update(dict.fromkeys(new))
        self.num_blocks += len(new)
        while self.num_blocks > self._max_blocks:
            self._trim()
        self._tidy(_TIDIED * len(new))

    def _trim(self) -> None:
        node = max(self._nodes.values(), key=lambda one: len(one.held))
        num_over = len(node.held) - self._max_blocks // len(self._nodes)
        num_trimmed = min(num_over, max(_MIN_TRIMMED, len(node.held) // 16))
        keys = list(islice(node.held, num_trimmed))
        for key in keys:
            del node.held[key]
        self._held.discard(keys, node.bit)
        self._on_given_up(keys)
        self.num_blocks -= len(keys)
        self.num_dropped += len(keys)

    def _take_bit(self, instance_id: InstanceId) -> int:
        bit = self._bits.take(instance_id)
        self._live |= bit
        return bit

    def _leave(self, node: _Node) -> None:
        """Nothing is known of it any more."""
        self._drop_guesses(node, list(node.guessed))
        self._live ^= node.bit
        self.num_blocks -= len(node.held)
        self._gone.append((node.bit, node.held))
        node.held = {}
        self._tidy(0)

    def _tidy(self, num_blocks: int) -> None:
        while self._gone:
            bit, held = self._gone[0]
            keys = [held.popitem()[0] for _ in range(min(num_blocks, len(held)))]
            self._held.discard(keys, bit)
            self._on_given_up(keys)
            num_blocks -= len(keys)
            if held:
                return
            self._gone.popleft()
            self._bits.give_back(bit)

    def _guess(self, node: _Node, keys: Sequence[int], now: float) -> None:
        self._settle(now)
        until = now + GUESS_S
        guessed = [key for key in keys if key not in node.held]
        if not guessed:
            return
        for key in guessed:
            node.guessed.pop(key, None)
            node.guessed[key] = until
        self.num_guessed += len(self._guessed.add(guessed, node.bit))
        self._guesses.append((until, node))
        while self.num_guessed > MAX_GUESSED_BLOCKS:
            self._end_guess()

    def _settle(self, now: float) -> None:
        while self._guesses and self._guesses[0][0] <= now:
            self._end_guess()

    def _end_guess(self) -> None:
        until, node = self._guesses.popleft()
        ended = []
        for key, its_until in node.guessed.items():
            if its_until > until:
                break
            ended.append(key)
        self._drop_guesses(node, ended)

    def _drop_guesses(self, node: _Node, keys: Sequence[int]) -> None:
        if not node.guessed:
            return
        gone = self._guessed.discard(keys, node.bit)
        self.num_guessed -= len(gone)
        for key in gone:
            del node.guessed[key]


def _from_last_clear(events: Sequence[CacheEvent]) -> Sequence[CacheEvent]:
    """What came before it need not be known."""
    for index in range(len(events) - 1, -1, -1):
        if isinstance(events[index], CacheCleared):
            return events[index:]
    return events
