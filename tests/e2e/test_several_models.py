"""Two models in one cluster of real processes: each request is answered as by an engine of the model that it names,
also while nodes of one model join, leave and drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.errors import InvalidRequestError, UnknownModelError
from kvrelay.inference import TokenPrompt, TokensGenerated
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import NodeClient
from tests.support.answers import ANSWER_TIMEOUT_S, ask, wait_until_quiet
from tests.support.cluster import Cluster, RoleProcess, running
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_requests import expected, greedy, random_prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMES = ("small", "large")
NUM_NODES = 4
BOUND_S = 60.0
ANSWER_TOKENS = 400


@dataclass
class TwoModels(Cluster):
    """`model` is "small"; a prefill and a decode node of each."""

    large: Path = Path()

    def __post_init__(self) -> None:
        self.coordinator_args = ["--model-name", "small", "--models", f"large={self.large}"]
        super().__post_init__()

    def make_roles(self) -> None:
        super().make_roles()
        for node in (*self.prefill, *self.decode):
            node.args += ["--model-name", "small"]
        self.prefill.append(self.large_node("prefill-node", len(self.prefill)))
        self.decode.append(self.large_node("decode-node", len(self.decode)))

    def large_node(self, role: str, index: int) -> RoleProcess:
        node = self._node(role, index, ["--model-name", "large"])
        node.args[node.args.index("--model") + 1] = str(self.large)
        return node


@pytest.fixture(scope="module")
def paths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"small": model, "large": make_tiny_model(tmp_path_factory.mktemp("large"), seed=1, num_layers=3)}


@pytest.fixture(scope="module")
def references(paths: dict[str, Path]) -> dict[str, ReferenceEngine]:
    return {name: ReferenceEngine(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def cluster(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoModels]:
    directory = tmp_path_factory.mktemp("several")
    shape = TwoModels(paths["small"], directory, num_blocks=256, with_store=False, large=paths["large"])
    with running(shape) as started:
        yield started
        assert "Traceback" not in started.logs()


@pytest.fixture
async def client(cluster: TwoModels) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.address) as client:
        yield client
        await wait_until_quiet(client, NUM_NODES)


async def test_each_request_is_answered_by_the_model_that_it_names(
    client: AsyncClient, references: dict[str, ReferenceEngine]
) -> None:
    prompts = [random_prompt(num_tokens, seed=num_tokens) for num_tokens in (1, 16, 100)]
    asked = [(name, prompt_ids) for prompt_ids in prompts for name in NAMES]
    answers = await asyncio.gather(*(ask(client, prompt_ids, greedy(24), model=name) for name, prompt_ids in asked))
    for (name, prompt_ids), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == expected(references[name], prompt_ids, 24), name
    assert answers[0].token_ids != answers[1].token_ids
    assert [(model.name, model.ready) for model in await client.list_models()] == [("small", True), ("large", True)]


async def test_an_unknown_name_and_no_name_are_refused_with_the_names(client: AsyncClient) -> None:
    with pytest.raises(UnknownModelError, match="model 'other' is not served here; 'small', 'large' are"):
        await ask(client, (5, 6), greedy(1), model="other")
    with pytest.raises(InvalidRequestError, match="has to name one of 'small', 'large'"):
        await ask(client, (5, 6), greedy(1))


async def test_a_node_of_one_model_joins_drains_and_dies_under_load_and_nothing_is_lost(
    cluster: TwoModels, client: AsyncClient, references: dict[str, ReferenceEngine]
) -> None:
    asked = [(name, random_prompt(100, seed=1_000 + number)) for number in range(2) for name in NAMES]
    wanted = [expected(references[name], prompt_ids, ANSWER_TOKENS) for name, prompt_ids in asked]
    node = cluster.large_node("decode-node", 9)
    cluster.decode.append(node)  # which ends it, should this fail
    for end in (node.stop, node.kill):
        node.start()
        await asyncio.to_thread(node.wait_ready)
        await _until_ready(client, NUM_NODES + 1)
        await _set_weight(cluster.decode[1], 0)  # so that it is the new one's turn
        answers = [Watched(client, name, prompt_ids) for name, prompt_ids in asked]
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(answer.has_begun.wait() for answer in answers))
        await _set_weight(cluster.decode[1], 1)
        await asyncio.to_thread(end)
        async with asyncio.timeout(BOUND_S):
            await asyncio.gather(*(answer.task for answer in answers))
        assert [tuple(answer.token_ids) for answer in answers] == wanted
        await _until_ready(client, NUM_NODES)


class Watched:
    """A request whose answer's beginning can be waited for."""

    def __init__(self, client: AsyncClient, model: str, prompt_ids: tuple[int, ...]) -> None:
        self.has_begun = asyncio.Event()
        self.token_ids: list[int] = []
        self.task = asyncio.create_task(self._ask(client, model, prompt_ids))

    async def _ask(self, client: AsyncClient, model: str, prompt_ids: tuple[int, ...]) -> None:
        try:
            async for event in client.generate(
                TokenPrompt(prompt_ids), greedy(ANSWER_TOKENS), model=model, timeout_s=ANSWER_TIMEOUT_S
            ):
                if isinstance(event, TokensGenerated):
                    self.token_ids += [token.token_id for token in event.tokens]
                    self.has_begun.set()
        finally:
            self.has_begun.set()  # an error is told by the task


async def _set_weight(node: RoleProcess, weight: float) -> None:
    async with open_channel(node.address) as channel:
        await NodeClient(channel).set_weight(weight)


async def _until_ready(client: AsyncClient, num_nodes: int) -> None:
    """The coordinator knows so many that are ready."""
    async with asyncio.timeout(BOUND_S):
        while sum(report.status.ready for report in (await client.status()).nodes) != num_nodes:
            await asyncio.sleep(0.02)
