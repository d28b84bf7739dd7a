"""What a coordinator refuses, over its real gRPC door: each row's status, code and words. Nothing is left of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from kvrelay.pb import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.byte_tokenizer import VOCAB_SIZE
from tests.support.coordinator_ends import Ends, ends

NAN, INFINITY = float("nan"), float("inf")

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
TOO_LONG = (grpc.StatusCode.INVALID_ARGUMENT, "context_length_exceeded")
NEVER_FITS = (grpc.StatusCode.INVALID_ARGUMENT, "exceeds_kv_capacity")
UNKNOWN_MODEL = (grpc.StatusCode.NOT_FOUND, "model_not_found")


@dataclass(frozen=True)
class Row:
    name: str
    request: inference_pb2.GenerateRequest
    expected: tuple[grpc.StatusCode, str]
    fragment: str


def row(
    name: str, fragment: str, expected: tuple[grpc.StatusCode, str] = INVALID, /, *, top: Any = None, **sampling: Any
) -> Row:
    """A request that is right but for the fields named: `top` of the request, the others of its sampling."""
    fields = {"text": "hello", **(top or {})}
    fields = {key: value for key, value in fields.items() if value is not None}
    request = inference_pb2.GenerateRequest(sampling=types_pb2.SamplingParams(**sampling), **fields)
    return Row(name, request, expected, fragment)


def ids(*token_ids: int) -> dict[str, Any]:
    return {"text": None, "token_ids": types_pb2.TokenIds(ids=token_ids)}


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    messages = [inference_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return {"text": None, "chat": inference_pb2.Chat(messages=messages)}


# The fake nodes' model takes 1,024 tokens; the largest decode pool has 32 blocks of 16, the prefill node's 40.
ROWS = [
    row("no prompt", "set one of text, token_ids or chat", top={"text": None}),
    row("too many answers", "n is 129; allowed is [1, 128]", top={"n": 129}),
    row("more answers than the queue holds", "n is 33; allowed is at most 32 here", top={"n": 33}),
    row("empty salt", "cache_salt is empty; leave it out", top={"cache_salt": ""}),
    row("long salt", "cache_salt has 1026 bytes; at most 1024 are allowed", top={"cache_salt": "ü" * 513}),
    row("long public name", "public_cache has 1025 bytes", top={"public_cache": "x" * 1025}),
    row("salt and public", "cache_salt and public_cache are both set", top={"cache_salt": "a", "public_cache": "b"}),
    row("negative TTL", "cache_ttl_s is -1; allowed is a number of seconds", top={"cache_ttl_s": -1.0}),
    row("endless TTL", "cache_ttl_s is inf; allowed is a number of seconds", top={"cache_ttl_s": INFINITY}),
    row("no number as TTL", "cache_ttl_s is nan", top={"cache_ttl_s": NAN}),
    row("empty text", "the prompt is empty", top={"text": ""}),
    row("empty token ids", "the prompt is empty", top=ids()),
    row("empty chat", "chat has no messages", top=chat()),
    row("unknown role", "role 'robot'; allowed are system, developer, user", top=chat(("user", "a"), ("robot", "b"))),
    row("empty role", "message 0 has the role ''", top=chat(("", "a"))),
    row("prompt longer than the model", "has 1024 tokens; bytes takes 1024", TOO_LONG, top={"text": "x" * 1024}),
    row(
        "text that cannot fit",
        "has 13313 characters; a prompt of 1024 tokens has 13312 at most",
        TOO_LONG,
        top={"text": "x" * 13_313},
    ),
    row("long text", "has 13312 tokens; bytes takes 1024", TOO_LONG, top={"text": "x" * 13_312}),
    row(
        "chat that cannot fit", "a prompt of 1024 tokens has 13312 at most", TOO_LONG, top=chat(("user", "x" * 13_313))
    ),
    row(
        "more token ids than the model takes", "has 1025 tokens; the model takes 1024", TOO_LONG, top=ids(*[999] * 1025)
    ),
    row("prompt and answer too long", "together 1025", TOO_LONG, top={"text": "x" * 900}, max_tokens=125),
    row("answer alone too long", "max_tokens is 4294967295", TOO_LONG, max_tokens=2**32 - 1),
    row("never fits decode", "need 33 KV blocks", NEVER_FITS, top={"text": "x" * 500}, max_tokens=13),
    row("never fits prefill", "largest prefill node has 40", NEVER_FITS, top={"text": "x" * 641}, max_tokens=1),
    row("unknown model", "'gpt-5' is not served here; 'bytes' is", UNKNOWN_MODEL, top={"model": "gpt-5"}),
    row("temperature below 0", "temperature is -0.1; allowed is [0, 2]", temperature=-0.1),
    row("temperature above 2", "temperature is 2.5", temperature=2.5),
    row("temperature NaN", "temperature is nan", temperature=NAN),
    row("temperature infinite", "temperature is inf", temperature=INFINITY),
    row("top_p 0", "top_p is 0.0; allowed is (0, 1]", top_p=0.0),
    row("top_p above 1", "top_p is 1.01", top_p=1.01),
    row("top_p NaN", "top_p is nan", top_p=NAN),
    row("min_p below 0", "min_p is -0.5", min_p=-0.5),
    row("min_p NaN", "min_p is nan", min_p=NAN),
    row("repetition_penalty 0", "repetition_penalty is 0.0", repetition_penalty=0.0),
    row("presence_penalty", "presence_penalty is 3.0; allowed is [-2, 2]", presence_penalty=3.0),
    row("frequency_penalty infinite", "frequency_penalty is -inf", frequency_penalty=-INFINITY),
    row("max_tokens 0", "max_tokens is 0; allowed is [1,", max_tokens=0),
    row("min_tokens above max_tokens", "min_tokens is 9, above max_tokens 8", min_tokens=9, max_tokens=8),
    row("min_tokens above the default", "above max_tokens 256", min_tokens=257),
    row("too many logprobs", "logprobs is 21; allowed is [0, 20]", logprobs=21),
    row("too many stops", "stop has 17 entries; at most 16", stop=["x"] * 17),
    row("stop too long", "has 1001 characters; at most 1000", stop=["x" * 1001]),
    row("empty stop", "empty string", stop=["x", ""]),
    row("too many stop token ids", "stop_token_ids has 65 entries; at most 64", stop_token_ids=[1] * 65),
    row("stop token id", f"stop_token_ids holds 259; token ids are in [0, {VOCAB_SIZE})", stop_token_ids=[259]),
    row("prompt token id", "token_ids holds 259; token ids are in [0, 259)", top=ids(3, 259)),
    row("prompt token id beyond int32", "token_ids holds 4294967295", top=ids(2**32 - 1)),
    row("logit bias id", "logit_bias holds 259", logit_bias={259: 1.0}),
    row("logit bias value", "logit_bias[3] is nan", logit_bias={3: NAN}),
    row("too many biases", "logit_bias has 301 entries", logit_bias=dict.fromkeys(range(301), 1.0)),
    row("no choice", "choice has 0 entries; allowed is [1, 1024]", choice=types_pb2.Choices()),
    row("empty choice", "choice holds an empty string", choice=types_pb2.Choices(texts=["x", ""])),
    row("long schema", "json_schema has 131073 bytes; at most 131072", json_schema="x" * 131_073),
    row("empty grammar", "grammar is empty; write one", grammar=""),
    row("bad regex", "regex is refused: invalid character class range", regex="[z-a]"),
    row("bad schema", "json_schema is refused: EOF while parsing", json_schema="{"),
    row("unknown keyword", 'json_schema is refused: Unimplemented keys: ["not"]', json_schema='{"not": {}}'),
    row("schema that is itself", "json_schema is refused: no answer conforms to it", json_schema='{"$ref": "#"}'),
    row("bad grammar", "grammar is refused: it is neither Lark", grammar="hello"),
    row("request id too long", "1 to 128 printable ASCII", top={"request_id": "x" * 129}),
    row("request id with a control character", "1 to 128 printable ASCII", top={"request_id": "a\nb"}),
    row("request id not ASCII", "1 to 128 printable ASCII", top={"request_id": "zoë"}),
]


@pytest.mark.parametrize("bad", ROWS, ids=lambda bad: bad.name)
async def test_generate_refuses(bad: Row) -> None:
    async with ends(max_queue=32) as cluster:
        cluster.prefill[0].num_blocks = 40
        cluster.prefill[0].tell()
        await cluster.until_status(lambda status: any(node.status.blocks.total == 40 for node in status.nodes))
        await expect(cluster, bad.request.SerializeToString(), bad.expected, bad.fragment)
        assert cluster.metric("kvrelay_errors_total", code=bad.expected[1]) == 1


# GenerateRequests whose fields hold bytes that are no UTF-8, and bytes that are no message.
RAW = {
    "text": b"\x1a\x02\xff\xfe",
    "request id": b"\x0a\x01\xff" + b"\x1a\x01x",
    "model": b"\x12\x01\xc3" + b"\x1a\x01x",
    "stop string": b"\x1a\x01x" + b"\x32\x04" + b"\x72\x02\x80\x80",
    "chat content": b"\x2a\x06" + b"\x0a\x04" + b"\x0a\x00\x12\xff",
    "no message at all": b"\xff\xff\xff",
    "cut short": b"\x1a\x05ab",
}


@pytest.mark.parametrize("payload", RAW.values(), ids=RAW.keys())
async def test_bytes_that_are_no_request(payload: bytes) -> None:
    async with ends() as cluster:
        await expect(cluster, payload, INVALID, "not UTF-8")


@pytest.mark.parametrize(
    ("method", "request_", "expected", "fragment"),
    [
        ("Tokenize", inference_pb2.TokenizeRequest(), INVALID, "no prompt"),
        ("Tokenize", inference_pb2.TokenizeRequest(model="other", text="x"), UNKNOWN_MODEL, "'other'"),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(text="x" * 4_194_305),
            TOO_LONG,
            "a text to tokenize has 4194304 at",
        ),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[259]), INVALID, "holds 259"),
        ("GetModel", inference_pb2.GetModelRequest(model="other"), UNKNOWN_MODEL, "'other'"),
        ("Cancel", inference_pb2.CancelRequest(), (grpc.StatusCode.NOT_FOUND, "not_found"), "''"),
    ],
)
async def test_other_calls_refuse(
    method: str, request_: Any, expected: tuple[grpc.StatusCode, str], fragment: str
) -> None:
    async with ends() as cluster, grpc.aio.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await getattr(stub, method)(request_)
        check(failed.value, expected, fragment)


async def test_no_nodes() -> None:
    async with ends(num_prefill=0, num_decode=0) as cluster:
        request = inference_pb2.GenerateRequest(text="hello").SerializeToString()
        unavailable = (grpc.StatusCode.UNAVAILABLE, "unavailable")
        await expect(cluster, request, unavailable, "no prefill-node and no decode-node is ready")
        assert not cluster.readiness.ready


async def expect(cluster: Ends, payload: bytes, expected: tuple[grpc.StatusCode, str], fragment: str) -> None:
    """The call fails as expected, and no node hears of it."""
    async with grpc.aio.insecure_channel(cluster.address) as channel:
        call = channel.unary_stream("/kvrelay.pb.Inference/Generate")(payload, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
    check(failed.value, expected, fragment)
    await cluster.check_idle()
    assert not any(node.requests for node in cluster.nodes)


def check(failed: grpc.aio.AioRpcError, expected: tuple[grpc.StatusCode, str], fragment: str) -> None:
    metadata = dict(failed.trailing_metadata() or ())
    error = types_pb2.Error.FromString(metadata["kvrelay-error-bin"])
    assert (failed.code(), error.code) == expected
    assert fragment in error.message
    assert failed.details() == error.message
