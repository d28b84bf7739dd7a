"""Every message survives the wire; what its type cannot rule out is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay import errors
from kvrelay.cluster import NodeStatus
from kvrelay.errors import ERRORS_BY_CODE, InvalidRequestError, KVRelayError
from kvrelay.inference import GenerateRequest, TokenPrompt
from kvrelay.kv.layout import KVLayout
from kvrelay.messages import AnswersAdvanced, HandoffTarget, NodeRequest, PrefillStarted
from kvrelay.pb import cluster_pb2, decode_pb2, kvstore_pb2, prefill_pb2, types_pb2
from kvrelay.rpc import (
    convert_cluster,
    convert_decode,
    convert_errors,
    convert_inference,
    convert_kvstore,
    convert_prefill,
    convert_types,
)
from kvrelay.sampling import GeneratedToken, SamplingParams, StepLogprobs, TokenLogprob
from kvrelay.types import AnswerHandle, CachedTokens, FinishReason, RequestId, Role, Tier
from tests.support import messages
from tests.support.messages import EXAMPLE_NODE, EXAMPLE_REQUEST


def converter(name: str) -> Callable[[Any], Any]:
    rooms = (convert_cluster, convert_decode, convert_prefill, convert_types)
    return next(getattr(room, name) for room in rooms if hasattr(room, name))


def round_trip(name: str, value: Any) -> Any:
    """Through bytes, so that nothing survives only in memory."""
    wire = converter(f"{name}_to_pb")(value)
    return converter(f"{name}_from_pb")(type(wire).FromString(wire.SerializeToString()))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sampling_params", messages.sampling_params),
        ("step_logprobs", messages.step_logprobs),
        ("cached_tokens", messages.cached_tokens),
        ("node_request", messages.node_requests()),
        ("kv_layout", messages.layouts),
        ("model_info", messages.model_infos),
        ("node_info", messages.node_infos),
        ("block_counts", messages.block_counts),
        ("node_status", messages.node_statuses),
        ("cache_events", messages.cache_events),
        ("handoff_target", messages.targets),
        ("prefill_event", messages.prefill_events),
        ("reservation_granted", messages.granted),
        ("answers_asked", messages.answers_asked),
        ("answers_advanced", messages.answers_advanced()),
    ],
)
@given(data=st.data())
def test_messages_survive_the_wire(data: st.DataObject, name: str, values: st.SearchStrategy[Any]) -> None:
    value = data.draw(values)

    assert round_trip(name, value) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("handoff_begin", messages.handoff_begins),
        ("handoff_end", messages.handoff_ends),
        ("blocks_received", messages.received),
    ],
)
@given(data=st.data())
def test_payloads_of_frames_survive_the_wire(data: st.DataObject, name: str, values: st.SearchStrategy[Any]) -> None:
    value = data.draw(values)
    payload = converter(f"{name}_to_bytes")(value)
    from_bytes = converter(f"{name}_from_bytes")

    assert from_bytes(payload) == value
    assert from_bytes(memoryview(payload)) == value


@given(request=messages.node_requests(), target=st.none() | messages.targets)
def test_prefill_requests_survive_the_wire(request: NodeRequest, target: HandoffTarget | None) -> None:
    wire = convert_prefill.prefill_request_to_pb(request, target)

    assert convert_prefill.prefill_request_from_pb(wire) == (request, target)


@given(
    request=messages.node_requests(),
    extra=st.integers(0, 100),
    num_now=st.integers(0, 100),
    itl_target_s=st.sampled_from([0.0, 0.05, 3.5]),
)
def test_reserve_requests_survive_the_wire(request: NodeRequest, extra: int, num_now: int, itl_target_s: float) -> None:
    num_tokens = len(request.token_ids) + extra
    wire = convert_decode.reserve_request_to_pb(request, num_tokens, num_now, itl_target_s)

    assert convert_decode.reserve_request_from_pb(wire) == (request, num_tokens, num_now, itl_target_s)


@pytest.mark.parametrize("role", Role)
def test_roles_survive_the_wire(role: Role) -> None:
    assert convert_cluster.role_from_pb(convert_cluster.role_to_pb(role)) is role


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_survive_the_wire(reason: FinishReason) -> None:
    assert convert_types.finish_reason_from_pb(convert_types.finish_reason_to_pb(reason)) is reason


@pytest.mark.parametrize("tier", [Tier.NONE, Tier.MEMORY, Tier.DISK])
def test_tiers_of_the_store_survive_the_wire(tier: Tier) -> None:
    assert convert_kvstore.tier_from_pb(convert_kvstore.tier_to_pb(tier)) is tier


@pytest.mark.parametrize("cls", sorted(set(ERRORS_BY_CODE.values()), key=lambda cls: cls.__name__))
def test_errors_survive_the_wire(cls: type[KVRelayError]) -> None:
    error = convert_errors.error_from_pb(convert_errors.error_to_pb(cls("what was wrong", retry_after_s=1.5)))

    assert type(error) is cls
    assert (error.message, error.retry_after_s) == ("what was wrong", 1.5)


def test_every_error_of_the_tree_has_a_code_of_its_own() -> None:
    classes = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVRelayError)]

    assert len({cls.code for cls in classes}) == len(classes) == len(ERRORS_BY_CODE)


def test_an_error_code_not_known_here_is_kept() -> None:
    error = convert_errors.error_from_pb(types_pb2.Error(code="quota", message="over quota", retryable=True))

    assert type(error) is KVRelayError
    assert (error.code, error.retryable, error.message) == ("quota", True, "over quota")
    assert (KVRelayError.code, KVRelayError.retryable) == ("internal", False)


def test_unset_fields_become_defaults() -> None:
    assert convert_types.sampling_params_from_pb(types_pb2.SamplingParams()) == SamplingParams()
    assert convert_cluster.node_status_from_pb(cluster_pb2.NodeStatus()) == NodeStatus()
    wire = types_pb2.NodeRequest(request_id="r", token_ids=[1], num_prompt_tokens=1)
    assert convert_types.node_request_from_pb(wire) == NodeRequest(RequestId("r"), (1,), 1, SamplingParams())
    assert convert_types.node_request_from_pb(wire).tenant == "default"
    assert convert_prefill.prefill_event_from_pb(
        prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted())
    ) == PrefillStarted(CachedTokens())


def test_of_many_prompts_a_status_tells_the_oldest_sixty_four() -> None:
    wire = convert_cluster.node_status_to_pb(NodeStatus(prompt_tokens=tuple(range(1, 101))))
    assert convert_cluster.node_status_from_pb(wire).prompt_tokens == tuple(range(1, 65))
    wire.prompt_tokens.append(1)
    with pytest.raises(InvalidRequestError, match="65 prompt_tokens are told; allowed are at most 64"):
        convert_cluster.node_status_from_pb(wire)


def test_zero_is_not_unset() -> None:
    params = SamplingParams(temperature=0.0, top_p=0.0, seed=0, max_tokens=0, logprobs=0)

    assert round_trip("sampling_params", params) == params


def request(**changes: Any) -> types_pb2.NodeRequest:
    wire = convert_types.node_request_to_pb(EXAMPLE_REQUEST)
    wire.MergeFrom(types_pb2.NodeRequest(**changes))
    return wire


def node(**changes: Any) -> cluster_pb2.NodeJoined:
    wire = convert_cluster.node_info_to_pb(EXAMPLE_NODE)
    for name, value in changes.items():
        setattr(wire, name, value)
    return wire


def told(*events: cluster_pb2.CacheEvent, first_sequence: int = 1) -> cluster_pb2.CacheEvents:
    return cluster_pb2.CacheEvents(first_sequence=first_sequence, events=events)


def layout(**changes: Any) -> types_pb2.KVLayout:
    wire = convert_cluster.kv_layout_to_pb(KVLayout(2, 2, 16, "float32"))
    for name, value in changes.items():
        setattr(wire, name, value)
    return wire


@pytest.mark.parametrize(
    ("from_pb", "wire", "message"),
    [
        (convert_types.node_request_from_pb, types_pb2.NodeRequest(), "a request id is 1 to 128 printable ASCII"),
        (convert_types.node_request_from_pb, request(request_id="r" * 129), "a request id is 1 to 128 printable ASCII"),
        (convert_types.node_request_from_pb, request(request_id="é"), "a request id is 1 to 128 printable ASCII"),
        (convert_types.node_request_from_pb, request(request_id="a\n"), "a request id is 1 to 128 printable ASCII"),
        (convert_types.node_request_from_pb, types_pb2.NodeRequest(request_id="r"), "token_ids is empty"),
        (
            convert_types.node_request_from_pb,
            request(num_prompt_tokens=4),
            r"num_prompt_tokens is 4; allowed is \[1, 3\]",
        ),
        (
            convert_types.node_request_from_pb,
            types_pb2.NodeRequest(request_id="r", token_ids=[1]),
            r"num_prompt_tokens is 0; allowed is \[1, 1\]",
        ),
        (convert_types.node_request_from_pb, request(tenant_salt=b"x" * 65), "tenant_salt has 65 bytes; at most 64"),
        (convert_types.node_request_from_pb, request(tenant="t" * 65), "allowed are 1 to 64 printable characters"),
        (convert_types.node_request_from_pb, request(tenant="a\x1b[2J"), r"tenant is 'a\\x1b\[2J'"),
        (convert_types.node_request_from_pb, request(cache_ttl_s=-1.0), "cache_ttl_s is -1; allowed is a number of"),
        (convert_types.node_request_from_pb, request(cache_ttl_s=math.inf), "cache_ttl_s is inf; allowed is a number"),
        (convert_types.node_request_from_pb, request(cache_ttl_s=math.nan), "cache_ttl_s is nan; allowed is a number"),
        (
            convert_decode.reserve_request_from_pb,
            decode_pb2.ReserveRequest(request=request(), num_tokens=2),
            "num_tokens is 2, fewer than the request's 3 tokens",
        ),
        (
            convert_decode.reserve_request_from_pb,
            decode_pb2.ReserveRequest(request=request(), num_tokens=3, itl_target_s=-0.5),
            "itl_target_s is -0.5; allowed is at least 0, finite",
        ),
        (
            convert_decode.reserve_request_from_pb,
            decode_pb2.ReserveRequest(request=request(), num_tokens=3, itl_target_s=math.nan),
            "itl_target_s is nan; allowed is at least 0, finite",
        ),
        (convert_cluster.node_info_from_pb, node(role=0), "role 0 is unknown"),
        (convert_cluster.node_info_from_pb, node(role=77), "role 77 is unknown"),
        (convert_cluster.node_info_from_pb, node(instance_id=""), "an instance id has 1 to 128 characters"),
        (convert_cluster.node_info_from_pb, node(address=""), "a node has to name the address"),
        (convert_cluster.cache_events_from_pb, told(first_sequence=0), "numbered from 1"),
        (convert_cluster.cache_events_from_pb, told(), "holds none"),
        (convert_cluster.cache_events_from_pb, told(cluster_pb2.CacheEvent()), "one of stored, removed and cleared"),
        (
            convert_cluster.cache_events_from_pb,
            told(cluster_pb2.CacheEvent(stored=cluster_pb2.CachedBlocks())),
            "names no block",
        ),
        (
            convert_cluster.cache_events_from_pb,
            told(cluster_pb2.CacheEvent(removed=cluster_pb2.CachedBlocks(block_hashes=[bytes(32), bytes(31)]))),
            "a block hash has 32 bytes",
        ),
        (convert_cluster.kv_layout_from_pb, layout(axes="kv,layer,token,head,dim"), "axes are 'kv,layer"),
        (convert_cluster.kv_layout_from_pb, layout(num_layers=0), "num_layers is 0"),
        (convert_cluster.kv_layout_from_pb, layout(dtype="int4"), "dtype is 'int4'"),
        (convert_types.finish_reason_from_pb, 0, "finish reason 0 is unknown"),
        (convert_kvstore.tier_from_pb, 9, "tier 9 is unknown"),
        (convert_prefill.handoff_target_from_pb, prefill_pb2.HandoffTarget(address="a:1"), "a handoff target needs"),
        (convert_prefill.prefill_event_from_pb, prefill_pb2.PrefillEvent(), "a PrefillEvent that says nothing"),
        (
            convert_decode.answers_advanced_from_pb,
            decode_pb2.DecodeReply(handles=[1], token_ids=[5, 6]),
            "2 token ids came with 1 handles",
        ),
        (
            convert_decode.answers_advanced_from_pb,
            decode_pb2.DecodeReply(with_logprobs=[decode_pb2.AnswerTokens(handle=1)]),
            "0 token ids came with 0 log-probabilities",
        ),
        (
            convert_decode.answers_advanced_from_pb,
            decode_pb2.DecodeReply(
                with_logprobs=[decode_pb2.AnswerTokens(handle=1, token_ids=[1, 2], logprobs=[types_pb2.StepLogprobs()])]
            ),
            "2 token ids came with 1 log-probabilities",
        ),
        (
            convert_decode.answers_advanced_from_pb,
            decode_pb2.DecodeReply(ended=[decode_pb2.AnswerEnded(handle=1)]),
            "an AnswerEnded that does not say how",
        ),
        (convert_decode.handoff_end_from_bytes, b"", "checksum has 16 bytes, not 0"),
        (convert_decode.handoff_begin_from_bytes, b"\xff\xff\xff", "3 bytes that are no HandoffBegin"),
        (convert_decode.handoff_begin_from_bytes, b"", "reservation id is empty"),
        (convert_decode.blocks_received_from_bytes, b"\x0a\xff", "2 bytes that are no ReceiveEvent"),
    ],
)
def test_what_the_schema_cannot_rule_out_is_refused(from_pb: Callable[[Any], Any], wire: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        from_pb(wire)


def test_the_device_tier_is_no_tier_of_the_store() -> None:
    with pytest.raises(KeyError):
        convert_kvstore.tier_to_pb(Tier.DEVICE)
    assert len(kvstore_pb2.Tier.values()) == 3


def test_log_probabilities_come_for_all_tokens_of_an_answer_or_for_none() -> None:
    step = StepLogprobs(TokenLogprob(1, -0.5), ())
    mixed = AnswersAdvanced(((AnswerHandle(1), (GeneratedToken(1, step), GeneratedToken(2))),))

    with pytest.raises(InvalidRequestError, match="some tokens of one event"):
        convert_decode.answers_advanced_to_pb(mixed)


def test_tokens_without_log_probabilities_are_two_columns() -> None:
    """What the node sends for a step costs a few bytes a token."""
    advanced = AnswersAdvanced(
        ((AnswerHandle(7), (GeneratedToken(20), GeneratedToken(21))), (AnswerHandle(9), (GeneratedToken(20),)))
    )

    wire = convert_decode.answers_advanced_to_pb(advanced)

    assert wire == decode_pb2.DecodeReply(handles=[7, 7, 9], token_ids=[20, 21, 20])
    assert wire.ByteSize() == 10


def test_the_tokens_of_an_answer_need_not_stand_together() -> None:
    wire = decode_pb2.DecodeReply(handles=[7, 9, 7], token_ids=[20, 30, 21])

    assert convert_decode.answers_advanced_from_pb(wire).tokens == (
        (7, (GeneratedToken(20), GeneratedToken(21))),
        (9, (GeneratedToken(30),)),
    )


def test_an_answer_that_failed_carries_its_error() -> None:
    failed = AnswersAdvanced(ended=((AnswerHandle(3), errors.OverloadedError("full", retry_after_s=0.5)),))

    [(handle, error)] = convert_decode.answers_advanced_from_pb(convert_decode.answers_advanced_to_pb(failed)).ended

    assert (handle, repr(error)) == (3, "OverloadedError('full')")
    assert isinstance(error, errors.OverloadedError)
    assert error.retry_after_s == 0.5


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(seed=2**64), SamplingParams(top_k=-1), SamplingParams(logit_bias={-1: 1.0})],
    ids=["seed", "top_k", "logit_bias"],
)
def test_values_the_schema_cannot_carry_are_refused_by_the_client(sampling: SamplingParams) -> None:
    request = GenerateRequest(TokenPrompt((1,)), sampling)
    with pytest.raises(InvalidRequestError, match="out of range"):
        convert_inference.generate_request_to_pb(request)
