"""What `kvrelay ask` and `kvrelay status` read and print."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvrelay import ask
from kvrelay.errors import InvalidRequestError
from kvrelay.kv.layout import NodeInfo
from kvrelay.rpc.convert_inference import ClusterStatus, NodeReport
from kvrelay.types import (
    BlockCounts,
    CachedTokens,
    FinishReason,
    GeneratedToken,
    InstanceId,
    NodeStatus,
    RequestAccepted,
    RequestFinished,
    RequestId,
    Role,
    Timing,
    TokensGenerated,
    Usage,
)
from tests.support.coordinator_ends import ends
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,2,3", (1, 2, 3)), ("[1, 2, 3]", (1, 2, 3)), ("7", (7,)), ("", ()), ("1 2\n3", (1, 2, 3))],
)
def test_token_ids(text: str, expected: tuple[int, ...]) -> None:
    assert ask.parse_ids(text) == expected


@pytest.mark.parametrize("text", ["1,x", "-1", "1.5", "4294967296", "٣"])
def test_what_is_no_token_id(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="no token id"):
        ask.parse_ids(text)


def test_token_ids_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[5, 6,\n 7]")
    assert ask.parse_ids(f"@{file}") == (5, 6, 7)
    with pytest.raises(InvalidRequestError, match="cannot read"):
        ask.parse_ids(f"@{tmp_path}/missing")


def test_percentiles() -> None:
    assert ask.percentiles([]) == (0.0, 0.0)
    assert ask.percentiles([0.5]) == (0.5, 0.5)
    assert ask.percentiles([float(n) for n in range(101)]) == (50.0, 95.0)


def finished_answer() -> ask.ClientAnswer:
    answer = ask.ClientAnswer(started_at=10.0)
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
    )
    return answer


def test_facts() -> None:
    assert ask.facts(finished_answer()) == (
        "[100 prompt tokens (cached: 64 device, 16 disk) | 3 tokens out (length) | TTFT 250 ms | "
        "inter-token p50 50 ms, p95 50 ms | KV handed over 1.5 MiB]"
    )


def test_json() -> None:
    described = ask.describe(finished_answer())
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
    }


def test_status_table() -> None:
    def report(role: Role, port: int, status: NodeStatus) -> NodeReport:
        return NodeReport(NodeInfo(role, InstanceId("i"), f"127.0.0.1:{port}", None), status, 0.1)

    blocks = BlockCounts(total=30, free=20, reserved=1, held=2, cached=7)
    nodes = (
        report(Role.DECODE_NODE, 7420, NodeStatus(ready=True, blocks=blocks, num_running=3, num_reservations=1)),
        report(Role.KVSTORE, 7401, NodeStatus(ready=True, memory_bytes=2**20, disk_bytes=0)),
    )
    assert ask.status_table("127.0.0.1:7400", ClusterStatus(nodes, 2, 3, ready=True)).splitlines() == [
        "coordinator 127.0.0.1:7400: ready, 3 running, 2 queued",
        "ROLE         ADDRESS         STATE  RUNNING  WAITING  RESERVED  BLOCKS free/reserved/held/cached  TOTAL",
        "decode-node  127.0.0.1:7420  ready  3        0        1         20/1/2/7                          30",
        "kvstore      127.0.0.1:7401  ready  -        -        -         memory 1.0 MiB, disk 0 B          -",
    ]


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main_ask(["hello", "--address", "127.0.0.1:1"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "kvrelay ask: no coordinator answers at 127.0.0.1:1; start a cluster with `kvrelay up`, or name it by "
        "--address\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "ask something"),
        ([""], "the question is empty; write one"),
        ([" \n"], "the question is empty; write one"),
        (["", "--raw"], "the question is empty; write one"),
        (["hello", "--prompt-ids", "1"], "is the whole prompt"),
        (["hello", "--raw", "--system", "s"], "which --raw skips"),
        (["hello", "--max-tokens", "-1"], "max_tokens is -1"),
    ],
)
def test_contradictions(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main_ask(argv) == 1
    assert message in capsys.readouterr().err


async def test_against_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        address = ["--address", cluster.address]

        assert await asyncio.to_thread(ask.main_ask, ["hello", "--system", "x" * 80, *address]) == 0
        answer, facts = capsys.readouterr().out.rstrip().split("\n\n")
        assert answer == ANSWER_TEXT
        assert "tokens out (stop)" in facts
        assert "KV handed over 4.0 KiB" in facts

        flags = ["--json", "--prompt-ids", "1,2,3", "--max-tokens", "4", "--temperature", "0", "--logit-bias", "5=-1.5"]
        assert await asyncio.to_thread(ask.main_ask, [*flags, "--stop-token-ids", "9", "--stop", "zz", *address]) == 0
        described = json.loads(capsys.readouterr().out)
        assert described["token_ids"] == list(ANSWER_IDS[:4])
        sampling = cluster.decode[0].requests[-1].sampling
        assert (sampling.temperature, sampling.logit_bias, sampling.stop_token_ids) == (0.0, {5: -1.5}, (9,))

        assert await asyncio.to_thread(ask.main_ask, ["hello", "--top-p", "2", *address]) == 1
        assert capsys.readouterr().err == "kvrelay ask: top_p is 2.0; allowed is (0, 1]\n"

        assert await asyncio.to_thread(ask.main_status, address) == 0
        assert "decode-node" in capsys.readouterr().out
        assert await asyncio.to_thread(ask.main_status, ["--json", *address]) == 0
        assert json.loads(capsys.readouterr().out)["nodes"][0]["role"] == "prefill-node"
