"""A bit a node, and back."""

from __future__ import annotations

from coordinator.node_bits import NodeBits
from kvrelay.types import InstanceId

A, B, C, D = (InstanceId(name) for name in "abcd")


def test_bits_stand_for_nodes() -> None:
    bits = NodeBits()
    assert [bits.take(name) for name in (A, B, C)] == [0b1, 0b10, 0b100]
    assert [sorted(bits.ids(nodes)) for nodes in (0b0, 0b1, 0b101, 0b111)] == [[], [A], [A, C], [A, B, C]]


def test_the_lowest_bit_that_is_free_is_taken_so_that_sets_stay_short() -> None:
    bits = NodeBits()
    for name in (A, B, C):
        bits.take(name)
    assert bits.ids(0b11) == [B, A]
    bits.give_back(0b100)
    bits.give_back(0b1)
    assert bits.take(D) == 0b1
    assert bits.ids(0b11) == [B, D]
