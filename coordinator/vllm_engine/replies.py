"""Answers as vLLM's gRPC protocol tells them: chunks of new tokens while it streams, then each answer whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2

from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, TokensGenerated
from kvrelay.sampling import GeneratedToken, StepLogprobs
from kvrelay.types import FinishReason


class Replies:
    """Of one request, from its events in their order.

    Chunks have the tokens since the last one; a complete message has all of an answer's. How much of the prompt was
    cached is known at the end, so complete messages wait for it, and chunks say 0.
    """

    def __init__(self, *, num_answers: int, stream: bool, stop_token_ids: Sequence[int]) -> None:
        self._stream = stream
        self._stop_token_ids = frozenset(stop_token_ids)
        self._prompt_tokens = 0
        self._tokens: list[list[GeneratedToken]] = [[] for _ in range(num_answers)]
        self._ended: dict[int, ChoiceFinished] = {}

    def of(self, event: RequestAccepted | TokensGenerated | ChoiceFinished | RequestFinished) -> Iterator[Any]:
        """The messages to send now."""
        match event:
            case RequestAccepted():
                self._prompt_tokens = event.prompt_tokens
            case TokensGenerated():
                self._tokens[event.index] += event.tokens
                if self._stream and event.tokens:
                    yield self._chunk(event)
            case ChoiceFinished():
                self._ended[event.index] = event
            case RequestFinished():
                yield from self._complete(event)

    def _chunk(self, event: TokensGenerated) -> Any:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=[token.token_id for token in event.tokens],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(event.tokens),
            output_logprobs=_logprobs(event.tokens),
            index=event.index,
        )
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def _complete(self, finished: RequestFinished) -> Iterator[Any]:
        for index, tokens in enumerate(self._tokens):
            ended = self._ended.get(index)
            reason, stop_string = (
                (ended.reason, ended.stop_string) if ended else (finished.reason, finished.stop_string)
            )
            complete = vllm_engine_pb2.GenerateComplete(
                output_ids=[token.token_id for token in tokens],
                finish_reason=reason.value,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(tokens),
                cached_tokens=finished.usage.cached.total,
                output_logprobs=_logprobs(tokens),
                index=index,
            )
            if stop_string:
                complete.matched_stop_str = stop_string
            elif reason is FinishReason.STOP and tokens and tokens[-1].token_id in self._stop_token_ids:
                complete.matched_token_id = tokens[-1].token_id
            yield vllm_engine_pb2.GenerateResponse(complete=complete)


def _logprobs(tokens: Iterable[GeneratedToken]) -> Any:
    """None where none were asked for."""
    steps = [token.logprobs for token in tokens if token.logprobs is not None]
    if not steps:
        return None
    return vllm_engine_pb2.OutputLogProbs(
        token_logprobs=[step.chosen.logprob for step in steps],
        token_ids=[step.chosen.token_id for step in steps],
        top_logprobs=map(_top, steps),
    )


def _top(step: StepLogprobs) -> Any:
    return vllm_engine_pb2.TopLogProbs(
        values=[one.logprob for one in step.top], token_ids=[one.token_id for one in step.top]
    )
