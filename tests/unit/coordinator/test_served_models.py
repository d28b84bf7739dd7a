"""Several models in one coordinator: which one is meant, which node is whose, and who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from coordinator.admission import Admission
from coordinator.cluster import Cluster
from coordinator.fairness import DeficitRounds
from coordinator.members import Members
from coordinator.nodes import Nodes
from coordinator.places import Places
from coordinator.queue import Demand, Ticket
from coordinator.retry_advice import RetryAdvice
from coordinator.served_models import ServedModel, ServedModels
from coordinator.tenant_policy import parse_policies
from coordinator.text import LongTexts, Text
from kvrelay.cluster import ListedModel, NodeInfo, NodeStatus
from kvrelay.errors import (
    ForeignBlockError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
)
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from kvrelay.types import InstanceId, Role
from tests.support.coordinator_ends import tokenizer_path
from tests.support.fake_nodes import MODEL

READY = NodeStatus(ready=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(tokenizer_path())


@pytest.fixture
def long_texts() -> Iterator[LongTexts]:
    texts = LongTexts()
    yield texts
    texts.close()


class Coordinator:
    """Its models, each with room for 40 in its queue, of tenants a and b, b with twice a's weight. A round's credit at
    weight 1 is 100 tokens."""

    def __init__(self, tokenizer: Tokenizer, long_texts: LongTexts, *names: str) -> None:
        policies = parse_policies("a:weight=1;b:weight=2")
        nodes = Nodes()

        def cluster() -> Cluster:
            return Cluster(Members(timeout_s=60.0), nodes, lambda: None)

        def admission() -> Admission:
            places = Places(policies, 40)
            return Admission(places, DeficitRounds(policies.weight, quantum_tokens=100), RetryAdvice(), max_trying=1)

        text = Text(tokenizer, long_texts)
        self.models = ServedModels([ServedModel(name, text, cluster(), admission()) for name in names], cluster())
        self.turns: list[str] = []

    def enter(self, model: str, name: str, num_tokens: int = 100) -> Ticket:
        """A request of the tenant that the name begins with."""
        admission = self.models.find(model).admission
        return admission.enter(lambda: self.turns.append(f"{model}/{name}"), Demand(name[0], num_tokens), 0.0)

    def new_turns(self) -> list[str]:
        turns, self.turns = self.turns, []
        return turns

    def close(self) -> None:
        for cluster in self.models.clusters:
            cluster.close()


@pytest.fixture
async def two(tokenizer: Tokenizer, long_texts: LongTexts) -> Any:
    coordinator = Coordinator(tokenizer, long_texts, "small", "large")
    yield coordinator
    coordinator.close()


@pytest.fixture
async def one(tokenizer: Tokenizer, long_texts: LongTexts) -> Any:
    coordinator = Coordinator(tokenizer, long_texts, "small")
    yield coordinator
    coordinator.close()


def node(
    name: str, model: str | None = "small", role: Role = Role.DECODE_NODE, *, port: int = 1, **changes: Any
) -> NodeInfo:
    info = replace(MODEL, name=model, **changes) if model else None
    return NodeInfo(role, InstanceId(name), f"host:{port}", info)


async def test_the_only_model_needs_no_name(one: Coordinator) -> None:
    assert one.models.find("").name == one.models.find("small").name == "small"
    with pytest.raises(UnknownModelError, match="model 'other' is not served here; 'small' is"):
        one.models.find("other")


async def test_of_several_one_has_to_be_named(two: Coordinator) -> None:
    assert two.models.find("large").name == "large"
    with pytest.raises(InvalidRequestError, match="the request has to name one of 'small', 'large'"):
        two.models.find("")
    with pytest.raises(UnknownModelError, match="model 'other' is not served here; 'small', 'large' are"):
        two.models.find("other")


async def test_nodes_go_to_the_model_that_they_name_and_each_model_has_weights_of_its_own(two: Coordinator) -> None:
    small, _ = two.models.join(node("one", "small", port=1))
    large, _ = two.models.join(node("two", "large", port=2, fingerprint="aa" * 32))
    assert [cluster is two.models.find(name).cluster for cluster, name in ((small, "small"), (large, "large"))] == [
        True,
        True,
    ]
    assert two.models.find("large").info == replace(MODEL, name="large", fingerprint="aa" * 32)
    with pytest.raises(ForeignBlockError, match=f"model fingerprint {'bb' * 32}, but this cluster's is {'aa' * 32}"):
        two.models.join(node("three", "large", port=3, fingerprint="bb" * 32))
    with pytest.raises(
        ForeignBlockError, match="serves a model named 'other'; this coordinator serves 'small', 'large': give"
    ):
        two.models.join(node("four", "other", port=4))
    with pytest.raises(InvalidRequestError, match="without saying which model"):
        two.models.join(node("five", None, port=5))
    assert [member.info.instance_id for member in two.models.members] == ["one", "two"]


async def test_where_there_is_one_model_nodes_may_call_it_as_they_like(one: Coordinator) -> None:
    one.models.join(node("one", "model.Q4"))
    assert one.models.find("").info == replace(MODEL, name="small")


async def test_kvstores_are_members_of_no_model(two: Coordinator) -> None:
    two.models.join(node("store", None, Role.KVSTORE))
    assert [member.info.instance_id for member in two.models.members] == ["store"]
    assert two.models.why_not_ready.count("no prefill-node and no decode-node is ready") == 2


async def test_a_process_that_serves_another_model_than_the_one_before_at_its_address_replaces_it(
    two: Coordinator,
) -> None:
    """Or else its channel would be closed when the old one is found silent."""
    cluster, member = two.models.join(node("old", "small", port=1))
    cluster.disconnect(member)
    two.models.join(node("new", "large", Role.PREFILL_NODE, port=1))
    assert [member.info.instance_id for member in two.models.members] == ["new"]


async def test_a_restarted_node_may_have_other_weights_at_once(two: Coordinator) -> None:
    """A dead process has no say in which weights are the right ones, neither for its successor nor for others."""
    cluster, member = two.models.join(node("old", "small", port=1, fingerprint="aa" * 32))
    cluster.disconnect(member)
    two.models.join(node("new", "small", port=1, fingerprint="bb" * 32))
    assert two.models.find("small").info.fingerprint == "bb" * 32


async def test_a_restarted_node_of_a_wrong_model_replaces_what_was_there_all_the_same(two: Coordinator) -> None:
    cluster, member = two.models.join(node("old", "small", port=1))
    cluster.disconnect(member)
    with pytest.raises(ForeignBlockError, match="serves a model named 'other'"):
        two.models.join(node("new", "other", port=1))
    assert two.models.members == []


@pytest.mark.parametrize("model", ["small", "large"])
async def test_who_claims_the_address_of_a_node_that_is_alive_waits(two: Coordinator, model: str) -> None:
    cluster, member = two.models.join(node("old", "small", port=1))
    newcomer = node("new", model, port=1)
    with pytest.raises(UnavailableError, match="host:1 is where decode-node old is, which is alive: give each node an"):
        two.models.join(newcomer)
    assert two.models.members == [member]
    cluster.disconnect(member)
    two.models.join(newcomer)
    assert [one.info.instance_id for one in two.models.members] == ["new"]


async def test_a_node_that_fell_silent_is_replaced_though_its_stream_is_open(two: Coordinator) -> None:
    _, member = two.models.join(node("old", "small", port=1))
    member.last_seen -= 2.0
    two.models.join(node("new", "large", port=1))
    assert [one.info.instance_id for one in two.models.members] == ["new"]


async def test_ready_while_any_model_is(two: Coordinator) -> None:
    assert two.models.why_not_ready == (
        "'small': no prefill-node and no decode-node is ready; 'large': no prefill-node and no decode-node is ready"
    )
    for name, role in (("prefill", Role.PREFILL_NODE), ("decode", Role.DECODE_NODE)):
        cluster, member = two.models.join(node(name, "large", role, port=len(name)))
        cluster.update(member, READY)
    assert two.models.why_not_ready == ""
    assert two.models.find("small").why_not_ready == "no prefill-node and no decode-node is ready"
    with pytest.raises(UnavailableError, match="no prefill or decode node of 'small' has joined"):
        _ = two.models.find("small").info
    assert [model.listed() for model in two.models] == [
        ListedModel("small", None, ready=False),
        ListedModel("large", replace(MODEL, name="large"), ready=True),
    ]


# Who waits for whom


async def test_a_refused_request_is_passed_by_those_of_other_models_and_by_no_tenant_of_its_own(
    two: Coordinator,
) -> None:
    large = two.enter("large", "a-refused", 900)
    assert two.new_turns() == ["large/a-refused"]
    two.models.find("large").admission.refused(large, now=0.0)
    two.enter("large", "b-behind", 1)
    assert two.new_turns() == []
    small = two.enter("small", "a-other", 900)
    assert two.new_turns() == ["small/a-other"]
    two.models.find("small").admission.admitted(small, 1.0)
    two.models.find("small").admission.changed()
    assert two.new_turns() == [], "a change of one model is none of the other"
    two.models.find("large").admission.changed()
    assert two.new_turns() == ["large/a-refused"]
    assert two.models.num_waiting == 2


async def test_one_that_tries_does_not_keep_those_of_another_model_from_it(two: Coordinator) -> None:
    """Each node answers Reserve at its own pace; one at a time may try, of each model."""
    for name in ("a1", "a2"):
        two.enter("large", name)
        two.enter("small", name)
    assert two.new_turns() == ["large/a1", "small/a1"]


async def test_a_full_queue_turns_none_of_another_model_away(two: Coordinator) -> None:
    for number in range(13):  # what a is owed of the 40 places
        two.enter("large", f"a{number}")
    with pytest.raises(OverloadedError):
        two.models.find("large").admission.check_room("a", 0.0, num_places=14)
    two.models.find("small").admission.check_room("a", 0.0, num_places=14)


async def test_tenants_take_turns_by_weight_within_each_model_whatever_they_have_in_others(two: Coordinator) -> None:
    """b, which had five rounds' worth of the large model at once, owes nothing in the line of the small one."""
    waiting = {"large/b-first": two.enter("large", "b-first", 1000)}
    names = [*(f"a{number}" for number in range(4)), *(f"b{number}" for number in range(5))]
    waiting |= {f"{model}/{name}": two.enter(model, name) for model in ("large", "small") for name in names}
    orders: dict[str, list[str]] = {"large": [], "small": []}
    while waiting:
        for turn in two.new_turns():
            model, name = turn.split("/")
            orders[model].append(name)
            two.models.find(model).admission.admitted(waiting.pop(turn), 1.0)
    assert orders["small"] == ["a0", "a1", "b0", "b1", "a2", "b2", "b3", "a3", "b4"]
    assert orders["large"] == ["b-first", "a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "b4"]
