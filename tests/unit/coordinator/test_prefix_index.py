"""Who has which blocks, as far as nodes told, and as far as they will have what was sent there."""

from __future__ import annotations

import hashlib

from coordinator.prefix_index import ASK_AGAIN_S, GUESS_S, MAX_GUESSED_BLOCKS, PrefixIndex
from kvrelay.cluster import CacheCleared, CacheEvent, CacheEvents, CacheRemoved, CacheStored
from kvrelay.types import BlockHash, InstanceId

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
T = 100.0


def hashes(text: str) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(char.encode()).digest()) for char in text]


def many(start: int, stop: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(b"%d" % number).digest()) for number in range(start, stop)]


class Index(PrefixIndex):
    """At one moment, unless a test says otherwise; nodes that tell keep count."""

    def __init__(self, *names: InstanceId, max_blocks: int = 1000) -> None:
        super().__init__(max_blocks)
        self.sequences: dict[InstanceId, int] = {}
        for name in names:
            self.joined(name, T)

    def tell(self, name: InstanceId, *events: CacheEvent, now: float = T) -> bool:
        first = self.sequences.get(name, 1)
        self.sequences[name] = first + len(events)
        return self.apply(name, CacheEvents(first, events), now)

    def begin(self, name: InstanceId, text: str) -> None:
        """The node has these blocks and tells so."""
        self.joined(name, T)
        self.sequences[name] = 1
        assert not self.tell(name, CacheCleared(), CacheStored(hashes(text)))

    def has(self, text: str, now: float = T) -> dict[InstanceId, int]:
        return self.match(hashes(text), now)


def test_leading_blocks_only_count() -> None:
    index = Index()
    index.begin(A, "wxyz")
    index.begin(B, "wx")
    index.begin(C, "yz")
    assert index.has("wxyq") == {A: 3, B: 2}
    assert index.has("qwx") == {}
    assert index.has("") == {}
    assert index.has("wxyz") == {A: 4, B: 2}
    assert index.num_blocks == 8


def test_an_evicted_block_is_offered_no_more() -> None:
    """Requests would go on being sent where their prefix is computed again."""
    index = Index()
    index.begin(A, "wxyz")
    index.begin(B, "wxyz")
    index.tell(A, CacheRemoved(hashes("yz")))
    assert index.has("wxyz") == {A: 2, B: 4}
    index.tell(A, CacheRemoved(hashes("w")))
    assert index.has("wxyz") == {B: 4}
    index.tell(A, CacheStored(hashes("w")))
    assert index.has("wxyz") == {A: 2, B: 4}


def test_what_a_node_never_had_may_be_removed() -> None:
    index = Index()
    index.begin(A, "w")
    index.tell(A, CacheRemoved(hashes("xw")), CacheStored(hashes("yy")))
    assert index.has("w") == {}
    assert index.has("y") == {A: 1}
    assert index.num_blocks == 1


def test_a_gap_is_asked_about_once_and_nothing_believed_until_the_node_begins_anew() -> None:
    index = Index()
    index.begin(A, "wx")
    index.sequences[A] += 1
    assert index.tell(A, CacheStored(hashes("y")))
    assert index.has("wxy") == {A: 2}
    assert not index.tell(A, CacheRemoved(hashes("w")), now=T + 0.1)
    assert index.has("wxy") == {A: 2}, "what was known holds meanwhile"
    assert not index.tell(A, CacheCleared(), CacheStored(hashes("xy")), now=T + 0.2)
    assert index.has("wxy") == {}
    assert index.has("xy") == {A: 2}
    assert index.num_resyncs == 1


def test_a_node_that_does_not_answer_is_asked_again_after_a_while() -> None:
    index = Index()
    index.begin(A, "w")
    index.sequences[A] = 7
    assert [index.tell(A, CacheStored(hashes("x")), now=T + late) for late in (0.0, 0.5, ASK_AGAIN_S, 1.5)] == [
        True,
        False,
        True,
        False,
    ]


def test_numbers_begin_anew_with_a_stream() -> None:
    index = Index()
    index.begin(A, "wx")
    index.joined(A, T)
    assert index.has("wx") == {A: 2}
    assert not index.apply(A, CacheEvents(3, (CacheStored(hashes("y")),)), T), "it was just asked"
    assert not index.apply(A, CacheEvents(1, (CacheCleared(),)), T)
    assert index.has("wx") == {}


def test_what_comes_before_a_clear_in_the_same_message_is_void() -> None:
    index = Index(A)
    events = (CacheStored(hashes("w")), CacheCleared(), CacheStored(hashes("x")))
    assert not index.apply(A, CacheEvents(9, events), T)
    assert index.has("w") == {}
    assert index.has("x") == {A: 1}
    assert not index.apply(A, CacheEvents(12, (CacheStored(hashes("y")),)), T)
    assert index.num_blocks == 2


def test_a_node_that_is_gone_and_one_that_never_joined_have_nothing() -> None:
    index = Index()
    index.begin(A, "wx")
    index.begin(B, "w")
    index.forget(A)
    index.forget(C)
    assert index.has("wx") == {B: 1}
    assert index.num_blocks == 1
    index.assigned(A, hashes("wx"), T)
    assert not index.tell(A, CacheStored(hashes("x")))
    assert index.has("wx") == {B: 1}


def test_a_new_node_inherits_nothing_of_one_that_is_gone() -> None:
    """Not even when it takes that one's place in every set, and however little was tidied away by then."""
    index = Index()
    for round_number in range(20):
        name = InstanceId(f"node-{round_number}")
        index.begin(name, "wxyz"[round_number % 3 :])
        assert index.has("w") == ({name: 1} if round_number % 3 == 0 else {})
        assert index.has("z") == {name: 1}
        index.forget(name)
        assert index.has("z") == {}


def test_what_was_just_sent_to_a_node_that_tells_counts_until_it_should_have_told() -> None:
    index = Index()
    index.begin(A, "w")
    index.assigned(A, hashes("wxy"), T)
    assert index.has("wxyz", T + GUESS_S - 0.1) == {A: 3}
    assert index.has("wxyz", T + GUESS_S) == {A: 1}


def test_a_burst_of_the_same_prompt_counts_from_its_last() -> None:
    index = Index()
    index.begin(A, "")
    for late in (0.0, 5.0, 10.0):
        index.assigned(A, hashes("wx"), T + late)
    assert index.has("wx", T + GUESS_S + 9.0) == {A: 2}
    assert index.has("wx", T + GUESS_S + 10.0) == {}
    assert index.num_guessed == 0


def test_what_the_node_says_settles_the_guess() -> None:
    index = Index()
    index.begin(A, "")
    index.assigned(A, hashes("wxyz"), T)
    index.tell(A, CacheStored(hashes("wxy")))
    index.tell(A, CacheRemoved(hashes("xy")))
    assert index.has("wxyz") == {A: 1}, "it was there and is gone"
    index.tell(A, CacheRemoved(hashes("z")))
    assert index.num_guessed == 0


def test_what_the_node_did_not_take_is_no_guess_any_more() -> None:
    index = Index()
    index.begin(A, "w")
    index.assigned(A, hashes("wxyz"), T)
    index.refused(A, hashes("wxyz"))
    assert index.has("wxyz") == {A: 1}, "what it told of stays"
    assert index.num_guessed == 0


def test_guesses_are_bounded_and_the_oldest_go() -> None:
    index = Index()
    index.begin(A, "")
    size = MAX_GUESSED_BLOCKS // 4
    prompts = [many(number * size, (number + 1) * size) for number in range(5)]
    for late, prompt in enumerate(prompts):
        index.assigned(A, prompt, T + late)
    assert index.num_guessed == 4 * size
    assert [index.match(prompt[:1], T + 5) for prompt in prompts] == [{}, {A: 1}, {A: 1}, {A: 1}, {A: 1}]


def test_of_a_node_that_tells_nothing_all_is_guessed_and_holds() -> None:
    index = Index(A, B)
    index.assigned(A, hashes("wxyz"), T)
    index.assigned(B, hashes("wx"), T)
    assert index.has("wxyz", T + 10 * GUESS_S) == {A: 4, B: 2}


def test_the_oldest_go_for_room_and_tails_first() -> None:
    index = Index(A, max_blocks=4)
    index.assigned(A, hashes("wxy"), T)
    index.assigned(A, hashes("pq"), T)
    assert index.has("wxy") == {A: 2}
    assert index.has("pq") == {A: 2}
    index.assigned(A, hashes("wx"), T)
    index.assigned(A, hashes("o"), T)
    assert index.has("wx") == {A: 2}, "what was used lately stays"
    assert index.has("pq") == {A: 1}
    assert (index.num_blocks, index.num_dropped) == (4, 2)


def test_a_node_that_has_most_pays_for_the_room_that_others_need() -> None:
    index = Index(B, C, max_blocks=300)
    index.joined(A, T)
    index.tell(A, CacheCleared(), CacheStored(many(0, 1000)))
    assert 200 <= index.num_blocks <= 300
    index.tell(B, CacheCleared(), CacheStored(many(2000, 2100)))
    index.tell(C, CacheCleared(), CacheStored(many(3000, 3100)))
    held = [
        sum(len(index.match([block], T)) for block in blocks)
        for blocks in (many(0, 1000), many(2000, 2100), many(3000, 3100))
    ]
    assert held == [100, 100, 100]
    assert index.num_dropped == 900
    assert index.match(many(0, 1000), T) == {A: 100}, "heads stay"


def test_nodes_that_come_and_go_leave_nothing_behind() -> None:
    index = Index(max_blocks=500)
    most = 0
    for number in range(60):
        name = InstanceId(f"node-{number}")
        index.joined(name, T)
        for part in range(4):
            start = 1000 * number + 100 * part
            index.tell(name, *([CacheCleared()] if part == 0 else []), CacheStored(many(start, start + 100)))
            index.assigned(name, many(0, 50), T)
            most = max(most, index.num_noted)
        if number >= 1:
            index.forget(InstanceId(f"node-{number - 1}"))
    assert most <= 1000
    assert index.num_blocks <= 500
    assert index.match(many(59_300, 59_400), T) == {InstanceId("node-59"): 100}


def test_endings_that_come_and_go_after_a_shared_beginning_leave_nothing_behind() -> None:
    index = Index(A, B)
    beginning = many(0, 10)
    for name in (A, B):
        index.tell(name, CacheCleared(), CacheStored(beginning))
    for number in range(1, 300):
        ending = many(100 * number, 100 * number + 10)
        for name in (A, B):
            index.assigned(name, beginning + ending, T)
            index.tell(name, CacheStored(ending))
        assert index.match(beginning + ending, T) == {A: 20, B: 20}
        for name in (A, B):
            index.tell(name, CacheRemoved(ending))
    assert (index.num_noted, index.num_blocks, index.num_guessed) == (10, 20, 0)
    assert index.match(beginning + ending, T) == {A: 10, B: 10}


def test_a_prefix_that_a_thousand_nodes_share() -> None:
    index = PrefixIndex(100_000)
    nodes = [InstanceId(f"node-{number}") for number in range(1000)]
    shared, own = many(0, 64), many(64, 80)
    for name in nodes:
        index.joined(name, T)
        index.apply(name, CacheEvents(1, (CacheCleared(), CacheStored(shared))), T)
    index.apply(nodes[7], CacheEvents(3, (CacheStored(own),)), T)
    index.apply(nodes[8], CacheEvents(3, (CacheRemoved(shared[32:]),)), T)
    assert index.match(shared + own, T) == {**dict.fromkeys(nodes, 64), nodes[7]: 80, nodes[8]: 32}
    assert index.num_noted == 80, "one entry a block, however many nodes have it"
