"""The facts and figures of an answer as a client saw it arrive."""

from __future__ import annotations

from kvrelay.client_answer import ClientAnswer, describe, facts, percentiles
from kvrelay.inference import ChoiceFinished, RequestAccepted, RequestFinished, Timing, TokensGenerated, Usage
from kvrelay.sampling import GeneratedToken
from kvrelay.types import CachedTokens, FinishReason, RequestId


def test_percentiles() -> None:
    assert percentiles([]) == (0.0, 0.0)
    assert percentiles([0.5]) == (0.5, 0.5)
    assert percentiles([float(n) for n in range(101)]) == (50.0, 95.0)


def finished_answer() -> ClientAnswer:
    answer = ClientAnswer(started_at=10.0)
    answer.accepted = RequestAccepted(RequestId("r"), 100, seed=7, max_tokens=3)
    answer.add(TokensGenerated((GeneratedToken(4),), "a"), 10.25)
    answer.add(TokensGenerated((GeneratedToken(5), GeneratedToken(6)), "bc"), 10.35)
    answer.add(TokensGenerated((), "d"), 10.9)  # held back text comes without a token
    answer.finished = RequestFinished(
        FinishReason.LENGTH,
        Usage(100, 3, CachedTokens(device=64, disk=16)),
        Timing(0.125, 0.25, 1.0, 0.5, 0.0625),
        prefill_node="a:1",
        decode_node="b:2",
        handoff_bytes=1_572_864,
        prefix_hash=b"\xab\xcd",
    )
    return answer


def test_facts() -> None:
    assert facts(finished_answer()) == (
        "[100 prompt tokens (cached: 64 device, 16 disk) | 3 tokens out (length) | TTFT 250 ms | "
        "inter-token p50 50 ms, p95 50 ms | KV handed over 1.5 MiB]"
    )


def test_facts_of_an_answer_that_was_there_already() -> None:
    answer = ClientAnswer(started_at=10.0)
    answer.add(TokensGenerated((GeneratedToken(4),), "a"), 10.25)
    answer.finished = RequestFinished(FinishReason.LENGTH, Usage(9, 1), Timing(), from_response_cache=True)
    assert facts(answer).endswith("| KV handed over 0 B | an earlier answer, given again]")


def test_facts_of_an_answer_of_one_token() -> None:
    answer = ClientAnswer(started_at=10.0)
    answer.add(TokensGenerated((GeneratedToken(4),), "a"), 10.25)
    answer.finished = RequestFinished(FinishReason.LENGTH, Usage(9, 1, CachedTokens()), Timing(0, 0.25, 0.25, 0, 0))
    assert facts(answer) == (
        "[9 prompt tokens (none cached) | 1 token out (length) | TTFT 250 ms | KV handed over 0 B]"
    )


def test_json() -> None:
    described = describe(finished_answer())
    assert described.pop("timing")["prefill_s"] == 0.5
    assert described == {
        "request_id": "r",
        "text": "abcd",
        "token_ids": [4, 5, 6],
        "finish_reason": "length",
        "stop_string": "",
        "seed": 7,
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 3,
            "cached_tokens": {"device": 64, "memory": 0, "disk": 16},
        },
        "nodes": {"prefill": "a:1", "decode": "b:2"},
        "handoff_bytes": 1_572_864,
        "retries": 0,
        "from_response_cache": False,
        "prefix_hash": "abcd",
    }


def two_answers() -> ClientAnswer:
    answer = ClientAnswer(started_at=10.0)
    finished = RequestFinished(FinishReason.STOP, Usage(100, 3), Timing(), stop_string="!")
    for event, now in (
        (RequestAccepted(RequestId("r"), 100, seed=7, max_tokens=3), 10.125),
        (TokensGenerated((GeneratedToken(4),), "a"), 10.25),
        (TokensGenerated((GeneratedToken(8),), "x", index=1), 10.5),
        (TokensGenerated((GeneratedToken(5),), "b"), 10.75),
        (ChoiceFinished(1, FinishReason.LENGTH, "", 1), 10.75),
        (ChoiceFinished(0, FinishReason.STOP, "!", 2), 10.875),
        (finished, 11.0),
    ):
        answer.add(event, now)
    return answer


def test_what_all_answers_have_together() -> None:
    answer = two_answers()
    assert [token.token_id for token in answer.tokens] == [4, 5, 8]
    assert answer.gaps_s == [0.5]
    assert answer.first_token_s == 0.25


def test_facts_of_several_answers() -> None:
    assert facts(two_answers()) == (
        "[100 prompt tokens (none cached) | 2 answers, 3 tokens out (1 stop, 1 length) | TTFT 250 ms | "
        "inter-token p50 500 ms, p95 500 ms | KV handed over 0 B]"
    )


def test_json_of_several_answers_lists_them_each_with_the_seed_that_alone_would_give_it() -> None:
    described = describe(two_answers())
    assert described["seed"] == 7
    assert described["usage"]["completion_tokens"] == 3
    assert "text" not in described
    assert described["choices"] == [
        {"index": 0, "text": "ab", "token_ids": [4, 5], "finish_reason": "stop", "stop_string": "!", "seed": 7},
        {
            "index": 1,
            "text": "x",
            "token_ids": [8],
            "finish_reason": "length",
            "stop_string": "",
            "seed": 2752974492218918672,
        },
    ]
