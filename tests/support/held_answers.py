"""Answers that are held to something, of a model whose logits are random: all of them that is not the grammar's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch

from kvrelay.engine.sequence import Sequence
from kvrelay.errors import KVRelayError
from kvrelay.grammars import Grammars
from kvrelay.model.adjust import SamplingRow
from kvrelay.model.sampler import Sampler
from kvrelay.sampling import SamplingParams
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.tokenizer import Tokenizer, load_tokenizer
from kvrelay.types import BlockHash, FinishReason
from tests.support.byte_tokenizer import EOS_TOKEN_ID, VOCAB_SIZE, make_byte_tokenizer
from tests.support.fake_engine import make_request

MODEL_VOCAB_SIZE = VOCAB_SIZE + 29  # a model may have more rows than its tokenizer has ids
EOS_IDS = (EOS_TOKEN_ID,)


@cache
def byte_tokenizer() -> Tokenizer:
    return load_tokenizer(make_byte_tokenizer(Path(mkdtemp(prefix="kvrelay-test-")) / "bytes"))


@cache
def byte_grammars() -> Grammars:
    return Grammars(byte_tokenizer(), EOS_IDS)


def schema(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.JSON_SCHEMA, text)


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(StructureKind.REGEX, text)


def ids(text: str) -> list[int]:
    return byte_tokenizer().encode(text, add_bos=False)


def allowed(mask: bytes) -> set[int]:
    """Token ids of a mask's bits."""
    return {token_id for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1}


@dataclass
class HeldAnswer:
    text: str
    token_ids: list[int]
    reason: FinishReason | None


def random_answers(structures: list[StructuredOutput], max_tokens: int = 400, **sampling: object) -> list[HeldAnswer]:
    """One to each, drawn side by side; row i draws with the seed i."""
    params = {"temperature": 1.0, "max_tokens": max_tokens, **sampling}
    sequences = []
    for seed, structured in enumerate(structures):
        request = make_request((5, 6), **{"structured": structured, "seed": seed, **params})  # type: ignore[arg-type]
        matcher = byte_grammars().matcher(structured)
        sequences.append(Sequence.create(request, BlockHash(bytes(32)), 16, matcher))
    reasons: dict[int, FinishReason] = {}
    noise = torch.Generator().manual_seed(1)
    while live := [index for index in range(len(sequences)) if index not in reasons]:
        logits = torch.randn(len(live), MODEL_VOCAB_SIZE, generator=noise)
        rows = [_row(sequences[index]) for index in live]
        for index, token in zip(live, Sampler().sample(logits, rows), strict=True):
            assert not isinstance(token, KVRelayError)
            sequences[index].append(token.token_id)
            reason = sequences[index].finish_reason(EOS_IDS, 10_000)
            if reason is not None:
                reasons[index] = reason
    return [
        HeldAnswer(byte_tokenizer().decode(sequence.output_ids), sequence.output_ids, reasons[index])
        for index, sequence in enumerate(sequences)
    ]


def _row(sequence: Sequence) -> SamplingRow:
    assert sequence.matcher is not None
    params: SamplingParams = sequence.request.sampling
    mask = sequence.matcher.mask()
    return SamplingRow(params, sequence.num_tokens, sequence.token_ids, sequence.num_prompt_tokens, EOS_IDS, mask)
