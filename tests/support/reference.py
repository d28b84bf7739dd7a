"""One engine that answers alone: the whole prompt in one step, then token after token, no cache and no batch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from kvrelay.engine.batch import Batch, ScheduledRow
from kvrelay.engine.load import LoadedEngine, load_engine
from kvrelay.engine.sequence import Sequence
from kvrelay.grammars import Grammars
from kvrelay.kv.hashing import chain_root
from kvrelay.messages import NodeRequest
from kvrelay.sampling import GeneratedToken
from kvrelay.tokenizer import load_tokenizer
from kvrelay.types import BlockId


class ReferenceEngine:
    def __init__(self, model: Path, num_blocks: int = 64) -> None:
        self._engine: LoadedEngine = load_engine(model, dtype="float32", num_blocks=num_blocks, threads=1)
        self._num_blocks = num_blocks
        self._model = model

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(load_tokenizer(self._model), self._engine.info.eos_token_ids)

    def answer(self, request: NodeRequest) -> list[int]:
        """`sampling.max_tokens` token ids, also past an end-of-sequence unless the answer is held to something."""
        return [token.token_id for token in self.generate(request)]

    def generate(self, request: NodeRequest) -> list[GeneratedToken]:
        """As `answer`, with what else a draw gives."""
        assert request.sampling.max_tokens is not None
        structured, info = request.sampling.structured, self._engine.info
        matcher = None if structured is None else self._grammars.matcher(structured)
        sequence = Sequence.create(request, chain_root("reference", "", b""), info.layout.block_tokens, matcher)
        sequence.block_table = [BlockId(i) for i in range(self._num_blocks)]
        tokens: list[GeneratedToken] = []
        for _ in range(request.sampling.max_tokens):
            count = sequence.num_uncomputed
            (token,) = self._engine.runner.run(Batch((ScheduledRow(sequence, count),)))
            assert isinstance(token, GeneratedToken)
            sequence.num_computed_tokens += count
            sequence.append(token.token_id)
            tokens.append(token)
            if structured is not None and token.token_id in info.eos_token_ids:
                break
        return tokens
