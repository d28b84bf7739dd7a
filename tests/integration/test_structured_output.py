"""Answers that are held to something keep to it, with the same tokens, wherever and however they are computed."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from kvrelay.engine.batch import Batch, Drawn
from kvrelay.errors import InvalidRequestError, StructureError
from kvrelay.messages import DecodeFinished, NodeRequest, ReservationGranted
from kvrelay.sampling import SamplingParams
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.types import FinishReason, RequestId
from tests.support.handoff_pair import NUM_BLOCKS, TIMEOUT_S, Pair, pair
from tests.support.held_answers import byte_tokenizer, ids, regex, schema
from tests.support.reference import ReferenceEngine
from tests.support.tiny_model import make_tiny_model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green", None]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
NO_SPACES = dict.fromkeys(ids(" \t\n"), -100.0)  # a random model writes too many of them between two tokens
LETTERS = regex("[a-z]{60}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=5)


@pytest.fixture(scope="module")
def reference(model: Path) -> ReferenceEngine:
    return ReferenceEngine(model, NUM_BLOCKS)


def held(structured: StructuredOutput, seed: int = 1, temperature: float = 1.0, max_tokens: int = 100) -> NodeRequest:
    prompt = tuple(3 + (seed * 31 + 7 * i) % 250 for i in range(40))
    sampling = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, structured=structured, logit_bias=NO_SPACES
    )
    return NodeRequest(RequestId(f"held-{seed}"), prompt, len(prompt), sampling)


def resumed(request: NodeRequest, answer: list[int]) -> NodeRequest:
    return replace(request, token_ids=(*request.token_ids, *answer))


async def handed_over(nodes: Pair, request: NodeRequest) -> tuple[list[int], DecodeFinished]:
    granted = await nodes.decode.reserve(request, request.num_prompt_tokens + 100, TIMEOUT_S)
    reading = asyncio.create_task(nodes.tokens(granted))
    await nodes.compute(request, nodes.target(granted))
    return await reading


async def prefilled(nodes: Pair, request: NodeRequest) -> None:
    """To the first token, which goes nowhere."""
    async with nodes.prefill.prefill(request, None) as events:
        async for _ in events:
            pass


async def computed_there(nodes: Pair, granted: ReservationGranted, *, tail: bool = True) -> list[int]:
    return [token.token_id for token in await nodes.generated(granted, compute_tail=tail)]


@contextmanager
def slow_steps(nodes: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile the decode node's engine waits 0.2 s before each step."""
    runner, over = nodes.decode_app.host.loaded.runner, threading.Event()
    run = runner.run

    def run_later(batch: Batch) -> list[Drawn]:
        over.wait(0.2)
        return run(batch)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", run_later)
        yield
        over.set()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_that_is_handed_over_conforms_and_is_that_of_one_engine_alone(
    model: Path, reference: ReferenceEngine, temperature: float
) -> None:
    async with pair(model) as nodes:
        for seed in range(3):
            request = held(schema(json.dumps(SCHEMA)), seed, temperature)
            token_ids, end = await handed_over(nodes, request)
            assert token_ids == reference.answer(request)
            assert end.reason is FinishReason.STOP
            jsonschema.validate(json.loads(byte_tokenizer().decode(token_ids)), SCHEMA)


async def test_an_answer_resumed_anywhere_draws_the_same_tokens(model: Path, reference: ReferenceEngine) -> None:
    """On a node that has seen nothing of it: by a handoff, and computed on the decode node."""
    request = held(schema(json.dumps(SCHEMA)), seed=4)
    expected = reference.answer(request)
    async with pair(model) as nodes:
        for num_sent in (1, 7, len(expected) - 1):
            rest = resumed(request, expected[:num_sent])
            assert (await handed_over(nodes, rest))[0] == expected[num_sent:]
            granted = await nodes.decode.reserve(rest, 140, TIMEOUT_S)
            assert await computed_there(nodes, granted) == expected[num_sent:]


async def test_answers_that_give_their_blocks_away_and_come_back_keep_to_it(
    model: Path, reference: ReferenceEngine
) -> None:
    """Each fits the pool alone, not two of them: seven blocks of ten."""
    requests = [held(LETTERS, seed) for seed in range(3)]
    async with pair(model, decode_settings={"num_blocks": 10, "reserve_output_tokens": 1}) as nodes:
        granted = [await nodes.decode.reserve(request, 140, TIMEOUT_S) for request in requests]
        answers = await asyncio.gather(*(computed_there(nodes, one) for one in granted))
        preempted = nodes.decode_registry.get_sample_value("kvrelay_preemptions_total", {"resume": "recompute"})
    assert preempted is not None
    assert preempted > 0
    assert answers == [reference.answer(request) for request in requests]
    assert all(re.fullmatch("[a-z]{60}", byte_tokenizer().decode(answer)) for answer in answers)


async def test_held_and_free_answers_side_by_side_do_not_change_each_other(
    model: Path, reference: ReferenceEngine
) -> None:
    free = replace(held(LETTERS, 9), sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=30, ignore_eos=True))
    choice = StructuredOutput(StructureKind.CHOICE, choices=("yes", "no"))
    requests = [free, held(choice, 1), held(LETTERS, 2), held(regex("a"), 3, max_tokens=2)]
    async with pair(model) as nodes:
        answers = await asyncio.gather(*(handed_over(nodes, request) for request in requests))
    assert [token_ids for token_ids, _ in answers] == [reference.answer(request) for request in requests]
    assert byte_tokenizer().decode(answers[1][0]) in ("yes", "no")


async def test_another_answer_to_the_same_prompt_is_held_to_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(model) as nodes:
        request = held(LETTERS, 5)
        granted = await nodes.decode.reserve(request, 140, TIMEOUT_S)
        first = asyncio.create_task(nodes.tokens(granted))
        with slow_steps(nodes, monkeypatch):  # the first answer must not have ended when the other is asked for
            await nodes.compute(request, nodes.target(granted))
            fork = await nodes.decode.fork(granted.reservation_id, 1, TIMEOUT_S)
        other = byte_tokenizer().decode(await computed_there(nodes, fork, tail=False))
        assert re.fullmatch("[a-z]{60}", other)
        assert other != byte_tokenizer().decode((await first)[0])


async def test_a_bad_grammar_is_refused_by_either_node_and_holds_nothing(model: Path) -> None:
    request = held(regex("[z-a]"))
    async with pair(model) as nodes:
        with pytest.raises(InvalidRequestError, match="regex is refused: invalid character class range"):
            await nodes.decode.reserve(request, 140, TIMEOUT_S)
        with pytest.raises(InvalidRequestError, match="regex is refused: invalid character class range"):
            await prefilled(nodes, request)


async def test_an_answer_that_cannot_go_on_fails_alone(model: Path, reference: ReferenceEngine) -> None:
    """Its tokens so far are not what it is held to, as those of a client's own might be."""
    broken, good = resumed(held(LETTERS, 6), [5]), held(LETTERS, 7)
    async with pair(model) as nodes:
        with pytest.raises(StructureError, match="the answer cannot go on as it has to"):
            await prefilled(nodes, broken)
        granted = [await nodes.decode.reserve(one, 140, TIMEOUT_S) for one in (broken, good)]
        failed, answer = await asyncio.gather(*(computed_there(nodes, one) for one in granted), return_exceptions=True)
        assert isinstance(failed, StructureError)
        assert answer == reference.answer(good)
