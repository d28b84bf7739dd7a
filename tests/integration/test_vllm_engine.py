"""The door for gateways of vLLM's gRPC protocol, by the stubs of PyPI's smg-grpc-proto, with fake nodes behind it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tokenizers import Tokenizer

from kvrelay.errors import UnavailableError
from kvrelay.rpc.channel import open_channel
from kvrelay.types import CachedTokens
from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends
from tests.support.fake_nodes import ANSWER_IDS, byte_ids

PROMPT_IDS = byte_ids("0123456789" * 10)


@asynccontextmanager
async def gateway(cluster: Ends) -> AsyncIterator[Any]:
    async with open_channel(cluster.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def wanted(*, stream: bool = False, prompt_ids: tuple[int, ...] = PROMPT_IDS, **sampling: Any) -> Any:
    params = vllm_engine_pb2.SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **sampling})
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=prompt_ids)
    return vllm_engine_pb2.GenerateRequest(tokenized=tokenized, sampling_params=params, stream=stream)


async def answer(stub: Any, request: Any, **metadata: str) -> list[Any]:
    pairs = tuple((f"x-kvrelay-{key.replace('_', '-')}", value) for key, value in metadata.items())
    call = stub.Generate(request, metadata=pairs, timeout=TIMEOUT_S)
    return [reply async for reply in call]


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), str(refused.value.details())


async def test_an_answer_that_is_not_streamed_is_one_message() -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        cluster.prefill[0].cached = CachedTokens(memory=48)
        [reply] = await answer(stub, wanted())
        complete = reply.complete
        assert tuple(complete.output_ids) == ANSWER_IDS
        assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("stop", None)
        counted = (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens)
        assert counted == (100, len(ANSWER_IDS), 48)
        assert not complete.HasField("output_logprobs")
        await cluster.check_idle()


async def test_a_stream_has_the_new_tokens_of_each_chunk_and_then_all() -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        *chunks, last = await answer(stub, wanted(stream=True, logprobs=2, seed=7))
        assert [token_id for reply in chunks for token_id in reply.chunk.token_ids] == list(ANSWER_IDS)
        for chunk in (reply.chunk for reply in chunks):
            assert (chunk.prompt_tokens, chunk.completion_tokens) == (100, len(chunk.token_ids))
            assert list(chunk.output_logprobs.token_ids) == list(chunk.token_ids)
            assert [len(top.values) for top in chunk.output_logprobs.top_logprobs] == [2] * len(chunk.token_ids)
        assert tuple(last.complete.output_ids) == ANSWER_IDS
        assert len(last.complete.output_logprobs.token_logprobs) == len(ANSWER_IDS)
        assert cluster.decode[0].requests[-1].sampling.seed == 7


async def test_several_answers_to_one_prompt_end_each_with_its_own_message() -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        replies = await answer(stub, wanted(n=3))
        assert [reply.complete.index for reply in replies] == [0, 1, 2]
        assert {tuple(reply.complete.output_ids) for reply in replies} == {ANSWER_IDS}


@pytest.mark.parametrize(
    ("sampling", "reason", "matched"),
    [
        ({"max_tokens": 5}, "length", None),
        ({"stop": ["42"]}, "stop", "42"),
        ({"stop_token_ids": [ANSWER_IDS[3]]}, "stop", ANSWER_IDS[3]),
    ],
    ids=["max-tokens", "stop-string", "stop-token"],
)
async def test_what_ended_an_answer(sampling: dict[str, Any], reason: str, matched: str | int | None) -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        [reply] = await answer(stub, wanted(**sampling))
        kind = reply.complete.WhichOneof("matched_stop")
        assert reply.complete.finish_reason == reason
        assert (getattr(reply.complete, kind) if kind else None) == matched


async def test_text_is_tokenized_here_and_metadata_says_what_the_protocol_cannot() -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        request = vllm_engine_pb2.GenerateRequest(text="0123456789" * 10, request_id="mine")
        request.sampling_params.max_tokens = 100
        await answer(stub, request, model="bytes", priority="-3", cache_salt="ours")
        [sent] = cluster.decode[0].requests
        assert sent.token_ids == PROMPT_IDS
        await answer(stub, wanted())
        assert cluster.decode[0].requests[1].tenant_salt != sent.tenant_salt
        assert (await cluster.client.explain("mine")).state == "finished"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (wanted(prompt_logprobs=1), "sampling_params.prompt_logprobs is set and not served"),
        (wanted(truncate_prompt_tokens=5), "sampling_params.truncate_prompt_tokens is set and not served"),
        (wanted(structural_tag="{}"), "sampling_params.structural_tag is set and not served"),
        (wanted(logprobs=-1), "logprobs is -1; allowed is [0, 20]"),
        (wanted(top_p=1.5), "top_p is 1.5"),
        (vllm_engine_pb2.GenerateRequest(), "the request has no prompt"),
        (vllm_engine_pb2.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json is set"),
        (vllm_engine_pb2.GenerateRequest(text="a", data_parallel_rank=2), "data_parallel_rank is 2"),
        (
            vllm_engine_pb2.GenerateRequest(text="a", mm_inputs=vllm_engine_pb2.MultimodalInputs(im_token_id=1)),
            "mm_inputs is set and not served: only text models are served",
        ),
    ],
)
async def test_what_is_not_served_is_refused_by_name(request_: Any, said: str) -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        code, message = await refusal(answer(stub, request_))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert said in message
        assert cluster.decode[0].requests == []


async def test_metadata_that_makes_no_sense_and_models_that_are_not_there_are_refused() -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        assert await refusal(answer(stub, wanted(), priority="high")) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "x-kvrelay-priority is 'high'; allowed is a whole number",
        )
        code, _ = await refusal(answer(stub, wanted(), model="another"))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_an_answer_that_fails_ends_the_call_with_its_status() -> None:
    async with ends(max_retries=0) as cluster, gateway(cluster) as stub:
        cluster.prefill[0].at["start"].failures = [UnavailableError("out of order")]
        assert await refusal(answer(stub, wanted(stream=True))) == (grpc.StatusCode.UNAVAILABLE, "out of order")


@pytest.mark.parametrize("by", ["abort", "cancel"])
async def test_an_aborted_or_cancelled_request_frees_everything(by: str) -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        cluster.decode[0].at["finish"].hold()
        request = wanted(stream=True)
        request.request_id = "mine"
        asked = asyncio.create_task(answer(stub, request))
        await cluster.decode[0].until_reached("finish")
        if by == "abort":
            await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["unknown", "mine"]))
            assert (await refusal(asked))[0] is grpc.StatusCode.CANCELLED
        else:
            asked.cancel()
        await cluster.check_idle()


async def test_a_gateway_learns_of_the_model_the_settings_and_the_load() -> None:
    async with ends(num_decode=2) as cluster, gateway(cluster) as stub:
        model = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert (model.served_model_name, model.model_type, model.is_generation) == ("bytes", "llama", True)
        assert (model.max_context_length, model.vocab_size, list(model.eos_token_ids)) == (1024, 259, [EOS_TOKEN_ID])
        server = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert (server.server_type, server.block_size, server.active_requests) == ("vllm-grpc", 16, 0)
        assert (server.is_paused, server.data_parallel_size) == (False, 1)
        loads = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
        [load] = loads.loads
        assert (load.num_running_reqs, load.num_waiting_reqs) == (0, 0)
        assert (load.max_total_num_tokens, load.num_used_tokens, load.token_usage) == (2 * 32 * 16, 0, 0.0)


async def test_health_tells_whether_a_request_sent_now_would_be_served() -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        assert (await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
        cluster.prefill[0].ready = False
        cluster.prefill[0].tell()
        await cluster.until_status(lambda status: not status.ready)
        reply = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
        assert not reply.healthy
        assert "prefill" in reply.message


async def test_the_tokenizer_comes_as_one_archive(tmp_path: Path) -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        data = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
        zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
        assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("0123456789" * 10).ids == list(PROMPT_IDS)
        assert "<|im_start|>" in (tmp_path / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", vllm_engine_pb2.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_calls_that_are_not_served_say_so(method: str, request_: Any) -> None:
    async with ends() as cluster, gateway(cluster) as stub:
        code, message = await refusal(getattr(stub, method)(request_))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert message
