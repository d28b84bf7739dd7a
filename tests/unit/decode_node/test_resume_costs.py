"""Recompute or load: whichever was measured to be cheaper."""

from decode_node.resume import Resume, ResumeCosts
from kvrelay.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, dtype="float32", block_tokens=16)


def measured(compute_s: float, load_s: float) -> ResumeCosts:
    """Costs of one block."""
    costs = ResumeCosts(LAYOUT, with_store=True)
    costs.stepped(num_rows=1, num_tokens=160, seconds=10 * compute_s)
    costs.loaded(num_blocks=4, seconds=4 * load_s)
    return costs


def test_without_a_store_it_is_computed() -> None:
    costs = ResumeCosts(LAYOUT, with_store=False)
    costs.stepped(1, 160, 100.0)
    assert costs.choose() is Resume.RECOMPUTE


def test_each_way_is_tried_before_they_are_compared() -> None:
    costs = ResumeCosts(LAYOUT, with_store=True)
    assert costs.choose() is Resume.RECOMPUTE
    costs.stepped(num_rows=8, num_tokens=8, seconds=1.0)
    assert costs.choose() is Resume.RECOMPUTE, "a step that only decodes says nothing of computing prompts"
    costs.stepped(num_rows=8, num_tokens=64, seconds=1.0)
    assert costs.choose() is Resume.SWAP
    costs.loaded(4, 0.1)
    assert costs.choose() is Resume.SWAP


def test_the_cheaper_way_is_taken_and_the_other_one_every_now_and_then() -> None:
    for costs, usual in ((measured(0.1, 0.2), Resume.RECOMPUTE), (measured(0.2, 0.1), Resume.SWAP)):
        choices = [costs.choose() for _ in range(64)]
        assert choices.count(usual) == 62
        assert choices[31] is choices[63] is not usual


def test_a_store_that_gave_nothing_is_dear_until_it_gives_again() -> None:
    costs = measured(0.2, 0.1)
    costs.loaded(0, 5.0)
    assert costs.choose() is Resume.RECOMPUTE
    costs.loaded(2, 0.2)
    assert costs.choose() is Resume.SWAP


def test_measurements_are_smoothed() -> None:
    costs = measured(0.2, 0.1)
    costs.loaded(1, 0.4)
    assert costs.choose() is Resume.SWAP, "0.19: one slow answer of the store is not yet its speed"
    costs.loaded(1, 0.4)
    assert costs.choose() is Resume.RECOMPUTE
