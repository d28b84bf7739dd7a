"""Who is a member of the cluster, and who may become one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.members import Member, Members
from kvrelay.cluster import ModelInfo, NodeInfo, NodeRates, NodeStatus
from kvrelay.errors import ForeignBlockError, InvalidRequestError, StaleError
from kvrelay.kv.layout import KVLayout
from kvrelay.types import BlockCounts, InstanceId, Role

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
MODEL = ModelInfo("m", "aa", "llama", 1024, 300, (2,), LAYOUT, "float32", "plain")
READY = NodeStatus(ready=True, blocks=BlockCounts(total=10, free=10))


def node(name: str = "one", role: Role = Role.DECODE_NODE, model: ModelInfo | None = MODEL) -> NodeInfo:
    return NodeInfo(role, InstanceId(name), f"{name}:1", model)


def test_member_is_usable_from_its_first_ready_status_on() -> None:
    members = Members(timeout_s=3.0)
    member = members.join(node(), now=0.0)
    assert members.usable(Role.DECODE_NODE) == []
    assert members.update(member, READY, now=0.1)
    assert members.usable(Role.DECODE_NODE) == [member]
    assert members.usable(Role.PREFILL_NODE) == []
    assert not members.update(member, READY, now=0.2)
    members.update(member, replace(READY, draining=True), now=0.3)
    assert members.usable(Role.DECODE_NODE) == []


def test_a_node_of_weight_0_takes_nothing_new_and_why_nobody_does_is_told() -> None:
    members = Members(timeout_s=3.0)
    assert members.why_not_ready == "no prefill-node and no decode-node is ready"
    decode, other = members.join(node("one"), now=0.0), members.join(node("two"), now=0.0)
    prefill = members.join(node("prefill", Role.PREFILL_NODE), now=0.0)
    for member in (decode, other, prefill):
        members.update(member, READY, now=0.1)
    assert members.why_not_ready == ""
    assert members.update(decode, replace(READY, weight=0.0), now=0.2)
    assert members.usable(Role.DECODE_NODE) == [other]
    assert (members.is_usable(InstanceId("one")), members.is_usable(InstanceId("two"))) == (False, True)
    members.update(other, replace(READY, draining=True), now=0.3)
    assert members.why_not_ready == "every decode-node that is ready has weight 0"
    members.update(prefill, replace(READY, ready=False), now=0.4)
    assert members.why_not_ready == "no prefill-node is ready and every decode-node that is ready has weight 0"
    members.update(decode, replace(READY, weight=0.01), now=0.5)
    assert members.why_not_ready == "no prefill-node is ready"


def test_status_after_an_assignment_counts_as_change() -> None:
    members = Members(timeout_s=3.0)
    member = members.join(node(), now=0.0)
    members.update(member, READY, now=0.1)
    member.assign(100)
    member.assign(200)
    assert member.load.assigned == (100, 200)
    assert members.update(member, READY, now=0.2)
    assert member.load.assigned == ()


def test_a_node_that_got_faster_or_further_has_no_more_room_for_it() -> None:
    members = Members(timeout_s=3.0)
    member = members.join(node(), now=0.0)
    members.update(member, READY, now=0.1)
    status = replace(READY, rates=NodeRates(prefill_tokens_per_s=100.0), num_waiting_tokens=5, step_tokens=9)
    assert not members.update(member, status, now=0.2)
    assert member.status == status


def test_silence_ends_membership() -> None:
    members = Members(timeout_s=3.0)
    first, second = members.join(node("one"), now=0.0), members.join(node("two"), now=1.0)
    assert members.next_expiry() == 3.0
    assert members.expire(2.9) == []
    assert members.expire(3.0) == [first]
    assert members.all() == [second]
    assert members.next_expiry() == 4.0
    with pytest.raises(StaleError, match="join again"):
        members.update(first, READY, now=3.1)


def test_member_that_joins_again_keeps_its_pool_size_but_waits_for_a_status() -> None:
    members = Members(timeout_s=3.0)
    first = members.join(node(), now=0.0)
    members.update(first, READY, now=0.1)
    members.disconnect(first)
    assert members.usable(Role.DECODE_NODE) == []
    again = members.join(node(), now=0.2)
    assert members.all() == [again]
    assert members.largest_pool(Role.DECODE_NODE) == 10
    members.disconnect(first)  # the old stream's end comes late
    members.update(again, READY, now=0.3)
    assert members.usable(Role.DECODE_NODE) == [again]


def test_a_member_that_says_nothing_has_a_reason_all_the_same() -> None:
    members = Members(timeout_s=3.0)
    first = members.join(node(), now=0.0)
    assert first.status.not_ready_reason == "joined, and has not said yet how it is"
    members.update(first, READY, now=0.1)
    assert first.status.not_ready_reason == ""
    members.disconnect(first)
    assert (first.status.ready, first.status.not_ready_reason) == (False, "its connection to the coordinator has ended")
    again = members.join(node(), now=0.2)
    assert again.status.not_ready_reason == "joined, and has not said yet how it is"


def test_new_process_at_an_address_names_its_past() -> None:
    members = Members(timeout_s=3.0)
    old = members.join(node("one"), now=0.0)
    new = replace(node("one"), instance_id=InstanceId("two"))
    members.join(new, now=0.1)
    assert members.past_of(new) is old
    assert members.past_of(replace(new, role=Role.PREFILL_NODE)) is old
    members.remove(old)
    assert members.past_of(new) is None


def test_a_member_is_alive_while_its_stream_is_open_and_it_was_heard_of_lately() -> None:
    members = Members(timeout_s=12.0)
    member = members.join(node(), now=0.0)
    assert (member.is_alive(1.9), member.is_alive(2.0)) == (True, False)
    members.update(member, READY, now=5.0)
    assert member.is_alive(6.9)
    members.disconnect(member)
    assert not member.is_alive(5.0)
    again = members.join(node(), now=5.5)
    assert again.is_alive(5.6)
    members.disconnect(member)  # the old stream's end comes late
    assert again.is_alive(5.6)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(MODEL, fingerprint="bb"), "model fingerprint bb, but this cluster's is aa"),
        (replace(MODEL, layout=replace(LAYOUT, block_tokens=32)), "KV layout fingerprint"),
        (replace(MODEL, max_model_len=2048), "model length 2048"),
        (replace(MODEL, vocab_size=400), "vocabulary size 400"),
        (replace(MODEL, vocab_size=200), "200 token ids, but the coordinator's tokenizer has 250"),
    ],
)
def test_foreign_model_is_refused(model: ModelInfo, message: str) -> None:
    members = Members(timeout_s=3.0, min_vocab_size=250)
    members.join(node("one", Role.PREFILL_NODE), now=0.0)
    with pytest.raises(ForeignBlockError, match=message):
        members.join(node("two", model=model), now=0.0)
    assert len(members.all()) == 1


def test_other_model_may_come_when_all_have_left() -> None:
    members = Members(timeout_s=3.0)
    members.remove(members.join(node(), now=0.0))
    other = replace(MODEL, fingerprint="bb")
    members.join(node("two", model=other), now=0.0)
    assert members.model == other


def test_nonsense_is_refused() -> None:
    members = Members(timeout_s=3.0)
    with pytest.raises(InvalidRequestError, match="protocol version 2"):
        members.join(replace(node(), protocol_version=2), now=0.0)
    with pytest.raises(InvalidRequestError, match="without saying which model"):
        members.join(node(model=None), now=0.0)
    with pytest.raises(InvalidRequestError, match="is empty"):
        members.join(replace(node(), address=""), now=0.0)
    members.join(node("store", Role.KVSTORE, model=None), now=0.0)
    assert members.model is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "tell", "disconnect", "remove"]),
        st.sampled_from(["one", "two", "three"]),
        st.sampled_from([READY, replace(READY, draining=True), replace(READY, weight=0.0), NodeStatus()]),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_usable_ones_are_those_members_that_say_so(steps: list[tuple[str, str, NodeStatus]]) -> None:
    """Also when streams of members that are none any more tell, or end, late."""
    members, known = Members(timeout_s=3.0), dict[str, list[Member]]()
    for number, (step, name, status) in enumerate(steps):
        role = Role.PREFILL_NODE if name == "one" else Role.DECODE_NODE
        if step == "join":
            known.setdefault(name, []).append(members.join(node(name, role), float(number)))
        for member in known.get(name, []):
            if step == "tell" and members.has(member):
                members.update(member, status, float(number))
            elif step == "disconnect":
                members.disconnect(member)
            elif step == "remove":
                members.remove(member)
        for each in (Role.PREFILL_NODE, Role.DECODE_NODE):
            expected = [one for one in members.all() if one.info.role is each and one.usable]
            found = sorted(members.usable(each), key=lambda one: one.info.instance_id)
            assert found == sorted(expected, key=lambda one: one.info.instance_id)
            assert members.num_usable(each) == len(expected)
