"""Strategies and examples of what crosses the wire, for round-trip tests and fake peers."""

from __future__ import annotations

from hypothesis import strategies as st

from kvrelay.cluster import CacheCleared, CacheEvents, CacheRemoved, CacheStored, ModelInfo, NodeInfo, NodeStatus
from kvrelay.kv.layout import ITEM_BYTES, KVLayout
from kvrelay.limits import DecodeLimits, PrefillLimits
from kvrelay.messages import (
    AnswersAdvanced,
    AnswersAsked,
    AnswerWanted,
    BlocksReceived,
    DecodeFinished,
    HandoffBegin,
    HandoffEnd,
    HandoffTarget,
    NodeRequest,
    PrefillFinished,
    PrefillStarted,
    ReservationGranted,
)
from kvrelay.sampling import GeneratedToken, SamplingParams, StepLogprobs, TokenLogprob
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.types import (
    AnswerHandle,
    BlockCounts,
    CachedTokens,
    FinishReason,
    InstanceId,
    RequestId,
    ReservationId,
    Role,
)

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
numbers = st.floats(allow_nan=False)
ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128)
texts = st.text(max_size=20)
some_ids = st.lists(u32, max_size=5).map(tuple)

structured = st.one_of(
    st.just(StructuredOutput(StructureKind.JSON_OBJECT)),
    st.builds(
        StructuredOutput,
        st.sampled_from([StructureKind.JSON_SCHEMA, StructureKind.REGEX, StructureKind.GRAMMAR]),
        texts,
    ),
    st.lists(texts, max_size=3).map(lambda choices: StructuredOutput(StructureKind.CHOICE, choices=tuple(choices))),
)
sampling_params = st.builds(
    SamplingParams,
    temperature=numbers,
    top_k=u32,
    top_p=numbers,
    min_p=numbers,
    repetition_penalty=numbers,
    presence_penalty=numbers,
    frequency_penalty=numbers,
    logit_bias=st.dictionaries(u32, numbers, max_size=4),
    seed=st.none() | u64,
    max_tokens=st.none() | u32,
    min_tokens=u32,
    ignore_eos=st.booleans(),
    stop_token_ids=some_ids,
    stop=st.lists(texts, max_size=3).map(tuple),
    logprobs=st.none() | u32,
    structured=st.none() | structured,
)
token_logprobs = st.builds(TokenLogprob, u32, st.floats(allow_nan=False, width=32))
step_logprobs = st.builds(StepLogprobs, token_logprobs, st.lists(token_logprobs, max_size=3).map(tuple))
generated_tokens = st.builds(GeneratedToken, u32, st.none() | step_logprobs)
tenants = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=64)
ttls = st.none() | st.floats(0, allow_infinity=False)
cached_tokens = st.builds(CachedTokens, u32, u32, u32)


@st.composite
def node_requests(draw: st.DrawFn) -> NodeRequest:
    token_ids = draw(st.lists(u32, min_size=1, max_size=8).map(tuple))
    return NodeRequest(
        RequestId(draw(ids)),
        token_ids,
        draw(st.integers(1, len(token_ids))),
        draw(sampling_params),
        draw(st.binary(max_size=64)),
        draw(tenants),
        draw(ttls),
    )


counts = st.integers(1, 2**31 - 1)
layouts = st.builds(KVLayout, counts, counts, counts, st.sampled_from(sorted(ITEM_BYTES)), counts)
model_infos = st.builds(ModelInfo, texts, texts, texts, u32, u32, some_ids, layouts, texts, texts)
node_infos = st.builds(
    NodeInfo, st.sampled_from(Role), ids.map(InstanceId), ids, st.none() | model_infos, protocol_version=u32
)
block_counts = st.builds(BlockCounts, u32, u32, u32, u32, u32)
decode_limits = st.builds(DecodeLimits, u32, u32, u32, u32)
prefill_limits = st.builds(PrefillLimits, u32, u32, u32, u32)
node_statuses = st.builds(
    NodeStatus,
    *(st.booleans(), st.booleans(), block_counts, u32, u32, u32, u32, u64, u64),
    st.none() | decode_limits | prefill_limits,
    step_tokens=u32,
    prompt_tokens=st.lists(u32, max_size=64).map(tuple),
)
block_hashes = st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=4)
cache_events = st.builds(
    CacheEvents,
    st.integers(1, 2**64 - 1),
    st.lists(
        st.builds(CacheStored, block_hashes) | st.builds(CacheRemoved, block_hashes) | st.builds(CacheCleared),
        min_size=1,
        max_size=4,
    ).map(tuple),
)
targets = st.builds(HandoffTarget, ids, texts, ids.map(ReservationId), u32, u32)
prefill_events = st.builds(PrefillStarted, cached_tokens) | st.builds(
    PrefillFinished, generated_tokens, cached_tokens, numbers, numbers, u64
)
granted = st.builds(ReservationGranted, texts, texts, u32, numbers)
token_runs = st.lists(st.builds(GeneratedToken, u32), min_size=1, max_size=4) | st.lists(
    st.builds(GeneratedToken, u32, step_logprobs), min_size=1, max_size=4
)
handles = u64.map(AnswerHandle)
answers_asked = st.builds(
    AnswersAsked,
    st.lists(st.builds(AnswerWanted, handles, ids.map(ReservationId), st.booleans(), numbers), max_size=4).map(tuple),
    st.lists(handles, max_size=4).map(tuple),
)
decode_ends = st.builds(DecodeFinished, st.sampled_from(FinishReason), cached_tokens, numbers)


@st.composite
def answers_advanced(draw: st.DrawFn) -> AnswersAdvanced:
    """Each answer once; those without log-probabilities first, as on the wire."""
    runs = draw(st.dictionaries(handles, token_runs.map(tuple), max_size=4))
    tokens = sorted(runs.items(), key=lambda run: run[1][0].logprobs is not None)
    return AnswersAdvanced(tuple(tokens), tuple(draw(st.lists(st.tuples(handles, decode_ends), max_size=4))))


handoff_begins = st.builds(HandoffBegin, ids, texts, u32, texts, texts, u32, u32)
handoff_ends = st.builds(HandoffEnd, u32, st.binary(min_size=16, max_size=16), generated_tokens)
received = st.builds(BlocksReceived, u32, st.booleans())

EXAMPLE_REQUEST = NodeRequest(RequestId("r1"), (1, 2, 3), 3, SamplingParams(seed=7, max_tokens=4), b"salt")
EXAMPLE_MODEL = ModelInfo(
    "tiny", "ab" * 32, "llama", 1024, 320, (2,), KVLayout(2, 2, 16, "float32"), "float32", "plain"
)
EXAMPLE_NODE = NodeInfo(Role.DECODE_NODE, InstanceId("1f2e"), "127.0.0.1:7420", EXAMPLE_MODEL)
