"""One coordinator, two models, fake nodes of each: every request is answered by the model that it names, and what
happens to one model is nothing to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrelay.client import Client
from kvrelay.cluster import ListedModel
from kvrelay.errors import InvalidRequestError, PromptTooLongError, UnavailableError, UnknownModelError
from kvrelay.inference import TextPrompt
from kvrelay.kv.layout import KVLayout
from tests.support.byte_tokenizer import EOS_TOKEN_ID
from tests.support.coordinator_ends import TIMEOUT_S, Ends, ends, greedy, tokenizer_path
from tests.support.fake_nodes import (
    ANSWER_IDS,
    MODEL,
    FakeDecodeNode,
    FakeNode,
    FakePrefillNode,
    byte_ids,
    other_model,
)

LARGE_IDS = (*byte_ids("Another answer."), EOS_TOKEN_ID)
LARGE = other_model(
    name="large",
    fingerprint="aa" * 32,
    layout=KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, dtype="float32", block_tokens=32),
)


def of_large(node: FakeNode) -> None:
    node.model, node.answer_ids = LARGE, LARGE_IDS


@asynccontextmanager
async def two_models(blocks: int = 32, **settings: Any) -> AsyncIterator[Ends]:
    """A prefill and a decode node of "bytes", then one each of "large", which has blocks of twice the size."""
    async with ends(blocks=blocks, models=f"large={tokenizer_path()}", **settings) as cluster:
        decode = FakeDecodeNode("decode-large", blocks)
        prefill = FakePrefillNode(cluster.decode, "prefill-large")
        for node in (prefill, decode):
            of_large(node)
            await node.start(cluster.address)
        cluster.prefill.append(prefill)
        cluster.decode.append(decode)
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 4)
        yield cluster


async def test_each_request_is_answered_by_the_model_it_names() -> None:
    async with two_models() as cluster:
        for _ in range(3):
            large, own = await asyncio.gather(cluster.ask(model="large"), cluster.ask(model="bytes"))
            assert (own.token_ids, large.token_ids) == (ANSWER_IDS, LARGE_IDS)
            assert (large.finished.prefill_node, large.finished.decode_node) == (
                cluster.prefill[1].address,
                cluster.decode[1].address,
            )
        assert [len(node.requests) for node in cluster.decode] == [3, 3]
        assert [report.info.model and report.info.model.name for report in (await cluster.client.status()).nodes] == [
            "bytes",
            "bytes",
            "large",
            "large",
        ]


async def test_calls_that_name_no_model_or_an_unknown_one_are_told_the_names() -> None:
    async with two_models() as cluster:
        client, text = cluster.client, TextPrompt("abc")
        for call in (cluster.ask, lambda: client.tokenize(text), lambda: client.detokenize([3]), client.get_model):
            with pytest.raises(InvalidRequestError, match="has to name one of 'bytes', 'large'"):
                await call()
        for call in (
            lambda: cluster.ask(model="other"),
            lambda: client.tokenize(text, model="other"),
            lambda: client.detokenize([3], model="other"),
            lambda: client.get_model("other"),
        ):
            with pytest.raises(UnknownModelError, match="'bytes', 'large' are"):
                await call()
        assert await client.tokenize(text, model="large") == byte_ids("abc")
        assert await client.detokenize(byte_ids("abc"), model="large") == "abc"
        assert await client.get_model("large") == LARGE


async def test_prompts_are_bounded_by_tenant_and_model() -> None:
    tenants = "default:max_prompt_tokens=100,max_prompt_tokens@large=99"
    async with two_models(tenants=tenants, max_prompt_tokens_by_model="bytes=100") as cluster:
        assert (await cluster.ask(model="bytes")).token_ids == ANSWER_IDS
        with pytest.raises(PromptTooLongError) as refused:
            await cluster.ask(model="large")
        assert refused.value.message == ("the prompt has 100 tokens; tenant 'default' may send 99 for model 'large'")
        with pytest.raises(PromptTooLongError):
            await cluster.ask(model="bytes", prompt=TextPrompt("x" * 101))


async def test_models_are_listed_and_told_apart_by_their_readiness() -> None:
    async with two_models() as cluster:
        await cluster.prefill[1].stop()
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 3)
        expected = (ListedModel("bytes", MODEL, ready=True), ListedModel("large", LARGE, ready=False))
        assert await cluster.client.list_models() == expected
        with Client(cluster.address) as client:
            assert await asyncio.to_thread(client.list_models) == expected
        usable = [
            cluster.metric("kvrelay_usable_nodes", model=model, role=role)
            for model in ("bytes", "large")
            for role in ("prefill-node", "decode-node")
        ]
        assert usable == [1, 1, 0, 1]


async def test_the_loss_of_one_model_leaves_the_other_served() -> None:
    async with two_models(no_node_wait_s=0.2, member_timeout_s=60.0) as cluster:
        lost = cluster.decode[1]
        lost.at["token"].hold()
        running = asyncio.create_task(cluster.ask(model="large"))
        await lost.until_reached("token")
        await lost.stop()
        with pytest.raises(UnavailableError):
            await running
        assert (await cluster.ask(model="bytes")).token_ids == ANSWER_IDS
        with pytest.raises(UnavailableError, match="model 'large' takes no requests now: no decode-node is ready"):
            await cluster.ask(model="large")
        assert cluster.readiness.ready
        again = FakeDecodeNode("decode-again")
        of_large(again)
        cluster.decode[1] = again
        await again.start(cluster.address)
        await cluster.until_status(lambda status: sum(node.status.ready for node in status.nodes) == 4)
        assert (await cluster.ask(model="large")).token_ids == LARGE_IDS


async def test_a_model_without_room_holds_up_no_other() -> None:
    """Its head of the line was refused, and waits."""
    async with two_models(blocks=10) as cluster:
        full = cluster.decode[1]
        full.at["token"].hold()
        asked = [asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=200), model="large"))]
        await full.until_reached("token")
        asked.append(asyncio.create_task(cluster.ask(sampling=greedy(max_tokens=200), model="large")))
        await cluster.until_queued(1)
        async with asyncio.timeout(TIMEOUT_S):
            while not cluster.metric("kvrelay_request_edges_total", edge="refused"):
                await asyncio.sleep(0.01)
        assert (await cluster.ask(sampling=greedy(max_tokens=40), model="bytes")).token_ids == ANSWER_IDS[:40]
        assert (await cluster.client.status()).num_queued == 1
        full.at["token"].let_go()
        assert [answer.token_ids for answer in await asyncio.gather(*asked)] == [LARGE_IDS] * 2


async def test_how_long_answers_of_one_model_get_says_nothing_of_anothers() -> None:
    """A prompt of 100 tokens and up to 100 more: 13 blocks of 16, or 7 of 32, where nothing shorter is expected."""
    async with two_models(reserve="expected") as cluster:
        for _ in range(20):  # answers of 45 tokens: enough to expect another
            await cluster.ask(model="bytes")
        for node, model, num_blocks in ((cluster.decode[0], "bytes", 10), (cluster.decode[1], "large", 7)):
            node.at["token"].hold()
            asked = asyncio.create_task(cluster.ask(model=model))
            async with asyncio.timeout(TIMEOUT_S):
                await node.until(lambda node=node: node.num_reserved > 0)  # type: ignore[misc]
            assert node.num_reserved == num_blocks
            node.at["token"].let_go()
            await asked
