"""A decode node with a real (tiny) model: handed-over, cached, computed and resumed answers are the same tokens."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from decode_node.app import DecodeApp
from decode_node.config import DecodeConfig
from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.sequence import Sequence
from kvrelay.errors import ConfigError, ModelFileError, UnavailableError
from kvrelay.kv.hashing import chain_root
from kvrelay.messages import DecodeFinished, NodeRequest, ReservationGranted
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.health import Readiness
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.rpc.raw import KV_TRANSFER, stream_stream
from kvrelay.rpc.server import bind, make_server
from kvrelay.sampling import GeneratedToken, SamplingParams
from kvrelay.types import BlockId, FinishReason, InstanceId, RequestId
from tests.support.decode_harness import Handoff, send
from tests.support.tiny_model import make_tiny_model

NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True, logprobs=2)


def make_request(prompt: tuple[int, ...], sampling: SamplingParams = GREEDY) -> NodeRequest:
    return NodeRequest(RequestId("r"), prompt, len(prompt), sampling)


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(3 + (i * 37 + i * i * 11 + salt * 101) % 256 for i in range(length))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


class Prefiller:
    """Computes prompts alone, one at a time: the reference, and the source of real slabs."""

    def __init__(self, model: Path) -> None:
        self.engine: LoadedEngine = load_engine(model, dtype="float32", num_blocks=NUM_BLOCKS, threads=1)

    def start(self, request: NodeRequest) -> tuple[Sequence, GeneratedToken]:
        sequence = Sequence.create(request, chain_root("reference", "", b""), 16)
        sequence.block_table = [BlockId(i) for i in range(NUM_BLOCKS)]
        return sequence, self._step(sequence)

    def answer(self, request: NodeRequest) -> list[GeneratedToken]:
        sequence, token = self.start(request)
        tokens = [token]
        while len(tokens) < (request.sampling.max_tokens or 0):
            sequence.append(tokens[-1].token_id)
            tokens.append(self._step(sequence))
        return tokens

    def _step(self, sequence: Sequence) -> GeneratedToken:
        count = sequence.num_uncomputed
        (token,) = self.engine.runner.run(Batch((ScheduledRow(sequence, count),)))
        sequence.num_computed_tokens += count
        assert isinstance(token, GeneratedToken)
        return token


@pytest.fixture(scope="module")
def prefiller(model: Path) -> Prefiller:
    return Prefiller(model)


@dataclasses.dataclass
class Node:
    app: DecodeApp
    client: DecodeClient
    address: str

    async def reserve(self, request: NodeRequest) -> ReservationGranted:
        num_tokens = request.num_prompt_tokens + (request.sampling.max_tokens or 0)
        return await self.client.reserve(request, num_tokens, timeout_s=10.0)

    async def read(self, granted: ReservationGranted, *, compute_tail: bool = False) -> list[GeneratedToken]:
        tokens: list[GeneratedToken] = []
        async with self.client.decode(granted.reservation_id, compute_tail, timeout_s=60.0) as events:
            async for event in events:
                if isinstance(event, DecodeFinished):
                    assert event.reason is FinishReason.LENGTH
                    return tokens
                tokens.extend(event.tokens)
        raise AssertionError("the stream ended without DecodeFinished")

    async def computed(self, request: NodeRequest) -> list[GeneratedToken]:
        return await self.read(await self.reserve(request), compute_tail=True)

    async def handed_over(self, request: NodeRequest, prefiller: Prefiller) -> tuple[int, list[GeneratedToken]]:
        """Blocks the node had, and the answer."""
        granted = await self.reserve(request)
        reading = asyncio.create_task(self.read(granted))
        _, first = prefiller.start(request)
        slabs = [prefiller.engine.cache.read_slab(BlockId(i)) for i in range(NUM_BLOCKS)]
        handoff = Handoff(prefiller.engine.info, request, granted, slab=slabs.__getitem__, first_token=first)
        async with open_channel(self.address) as channel:
            call = stream_stream(channel, KV_TRANSFER, "Receive")()
            for message in handoff.messages():
                received = await send(call, message)
            assert received.committed
            await call.done_writing()
        return granted.num_cached_blocks, await reading


@asynccontextmanager
async def serving(model: Path, **options: object) -> AsyncIterator[Node]:
    config = DecodeConfig(model=model, dtype="float32", threads=1, num_blocks=NUM_BLOCKS, **options)  # type: ignore[arg-type]
    app, server = DecodeApp(config, InstanceId("me"), CollectorRegistry()), make_server()
    app.register(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    readiness = Readiness(app.service_names)
    try:
        await app.start(address, readiness)
        await readiness.wait_ready()
        async with open_channel(address) as channel:
            yield Node(app, DecodeClient(channel), address)
        await app.drain(10.0)
        blocks = app.status().blocks
        assert (blocks.reserved, blocks.held, blocks.free + blocks.cached) == (0, 0, NUM_BLOCKS)
    finally:
        await server.stop(None)
        await app.close()


def assert_same(answer: list[GeneratedToken], expected: list[GeneratedToken]) -> None:
    """Tokens are equal; log-probabilities are up to what another order of additions changes in float32."""
    assert [token.token_id for token in answer] == [token.token_id for token in expected]
    for ours, theirs in zip(answer, expected, strict=True):
        if theirs.logprobs is None:
            assert ours.logprobs is None
        else:
            assert ours.logprobs is not None
            assert ours.logprobs.chosen.logprob == pytest.approx(theirs.logprobs.chosen.logprob, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_the_same_tokens_by_handoff_by_cache_and_computed_here(
    model: Path, prefiller: Prefiller, sampling: SamplingParams
) -> None:
    request = make_request(prompt_of(75), sampling)
    expected = prefiller.answer(request)
    async with serving(model) as node:
        for num_cached in (0, 4):
            num_found, answer = await node.handed_over(request, prefiller)
            assert num_found == num_cached
            assert_same(answer, expected)
        assert_same(await node.computed(request), expected)
    async with serving(model) as node:
        assert_same(await node.computed(request), expected)


async def test_many_at_once_are_each_as_if_alone(model: Path, prefiller: Prefiller) -> None:
    """Handed over and computed, greedy and seeded, more than rows of the batch."""
    requests = [
        make_request(prompt_of(length, salt=length), sampling)
        for length, sampling in [(5, GREEDY), (16, SEEDED), (33, GREEDY), (64, SEEDED), (90, GREEDY), (17, GREEDY)]
    ]
    expected = [prefiller.answer(request) for request in requests]
    async with serving(model, max_batch=4, max_batched_tokens=32) as node:
        computed = [asyncio.create_task(node.computed(request)) for request in requests[::2]]
        handed_over = [asyncio.create_task(node.handed_over(request, prefiller)) for request in requests[1::2]]
        answers = await asyncio.gather(*computed)
        answers += [answer for _, answer in await asyncio.gather(*handed_over)]
    for answer, right in zip(answers, expected[::2] + expected[1::2], strict=True):
        assert_same(answer, right)


async def test_an_answer_resumed_elsewhere_draws_the_same_tokens(model: Path, prefiller: Prefiller) -> None:
    request = make_request(prompt_of(40), SEEDED)
    expected = prefiller.answer(request)
    sent = tuple(token.token_id for token in expected[:9])
    resumed = dataclasses.replace(request, token_ids=request.token_ids + sent)
    async with serving(model) as node:
        assert_same(await node.computed(resumed), expected[9:])


async def test_until_the_model_is_loaded_calls_are_unavailable(model: Path) -> None:
    app, server = DecodeApp(DecodeConfig(model=model), InstanceId("me"), CollectorRegistry()), make_server()
    app.register(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await server.start()
    async with open_channel(address) as channel:
        with pytest.raises(UnavailableError, match="loading its model"):
            await DecodeClient(channel).reserve(make_request((5, 6)), 26, timeout_s=30.0)
    await server.stop(None)
    await app.close()


async def test_a_model_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    app = DecodeApp(DecodeConfig(model=tmp_path / "no.gguf"), InstanceId("me"), CollectorRegistry())
    with pytest.raises(ModelFileError, match=r"no\.gguf"):
        await app.start("127.0.0.1:1", Readiness())
    await app.close()


def test_settings_that_contradict_each_other_are_refused(model: Path) -> None:
    config = DecodeConfig(model=model, max_batch=64, max_batched_tokens=32)
    with pytest.raises(ConfigError, match="max_batch is 64; allowed is at most max_batched_tokens, 32"):
        DecodeApp(config, InstanceId("me"), CollectorRegistry())


async def test_a_pool_smaller_than_a_block_is_refused(model: Path) -> None:
    app = DecodeApp(DecodeConfig(model=model, kv_bytes=100), InstanceId("me"), CollectorRegistry())
    with pytest.raises(ConfigError, match="kv_bytes is 100, less than one block of"):
        await app.start("127.0.0.1:1", Readiness())
    await app.close()


async def test_blocks_too_large_to_travel_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of this model has 512 bytes of KV in float32; 16 of them do not fit into this message."""
    monkeypatch.setattr("kvrelay.engine.load.MAX_MESSAGE_BYTES", 7 * 512 + 76)
    app = DecodeApp(DecodeConfig(model=model, dtype="float32"), InstanceId("me"), CollectorRegistry())
    with pytest.raises(ConfigError, match="a message carries 3584; lower --block-tokens to 7 or less"):
        await app.start("127.0.0.1:1", Readiness())
    await app.close()
