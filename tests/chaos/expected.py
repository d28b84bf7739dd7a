"""What every shape's answer must be, from an engine that answers alone. Computed once, in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken, SamplingParams, fork_seed
from kvrelay.tokenizer import load_tokenizer
from kvrelay.types import FinishReason, RequestId
from tests.chaos.asks import Shape
from tests.support.reference import ReferenceEngine

NICENESS = 10


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """`logprobs` are those of the tokens drawn, where they were asked for."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    stop_string: str = ""
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """`sampling` is what to send: the shape's, with the stop string found in the answer."""

    shape: Shape
    sampling: SamplingParams
    choices: tuple[ExpectedChoice, ...]


def compute_expected(
    model: Path, shapes: Sequence[Shape], num_blocks: int, eos_token_ids: tuple[int, ...]
) -> list[Expected]:
    """Runs in a process of its own, which gives way to others."""
    os.nice(NICENESS)
    engine = ReferenceEngine(model, num_blocks)
    tokenizer = load_tokenizer(model)
    return [_expected(engine, shape, tokenizer.token_bytes, eos_token_ids) for shape in shapes]


def _expected(
    engine: ReferenceEngine, shape: Shape, token_bytes: Callable[[int], bytes], eos_token_ids: tuple[int, ...]
) -> Expected:
    sampling = shape.sampling
    assert sampling.seed is not None
    answers: list[list[GeneratedToken]] = []
    for index in range(shape.n):
        mine = replace(sampling, seed=fork_seed(sampling.seed, index))
        request = NodeRequest(RequestId("reference"), shape.prompt_ids, len(shape.prompt_ids), mine)
        tokens = engine.generate(request)
        answers.append(tokens if sampling.ignore_eos else _until(tokens, eos_token_ids))
    if shape.wants_stop:
        ids = [token.token_id for token in answers[0]]
        sampling = replace(sampling, stop=(pick_stop(ids, token_bytes),))
    endings = () if sampling.ignore_eos else eos_token_ids
    return Expected(shape, sampling, tuple(cut_at_stop(tokens, sampling, endings, token_bytes) for tokens in answers))


def pick_stop(token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> str:
    """One or two printable characters from the middle of the text, or some that no answer has."""
    text = b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")
    for at in range(len(text) // 2, len(text) - 1):
        pair = text[at : at + 2]
        if pair.isascii() and pair.isprintable() and text.index(pair) == at:
            return pair
    return "never to be found in such an answer"


def cut_at_stop(
    tokens: Sequence[GeneratedToken],
    sampling: SamplingParams,
    ending_ids: Sequence[int],
    token_bytes: Callable[[int], bytes],
) -> ExpectedChoice:
    """The answer up to the token that completes the stop string, its text up to where that string begins. `tokens` go
    no further than one of `ending_ids`, which has no text. Stop strings are ASCII."""
    reason = FinishReason.STOP if tokens and tokens[-1].token_id in ending_ids else FinishReason.LENGTH
    pieces = [token_bytes(token.token_id) for token in tokens]
    for stop in sampling.stop:
        for count in range(1, len(tokens) + 1):
            text = b"".join(pieces[:count]).decode("utf-8", "replace")
            if stop in text:
                return _choice(tokens[:count], text[: text.index(stop)], FinishReason.STOP, stop)
    return _choice(tokens, b"".join(pieces).decode("utf-8", "replace"), reason)


def _choice(tokens: Sequence[GeneratedToken], text: str, reason: FinishReason, stop: str = "") -> ExpectedChoice:
    logprobs = tuple(token.logprobs.chosen.logprob for token in tokens if token.logprobs is not None)
    return ExpectedChoice(tuple(token.token_id for token in tokens), text, reason, stop, logprobs or None)


def _until(tokens: list[GeneratedToken], ending_ids: Sequence[int]) -> list[GeneratedToken]:
    for index, token in enumerate(tokens):
        if token.token_id in ending_ids:
            return tokens[: index + 1]
    return tokens
