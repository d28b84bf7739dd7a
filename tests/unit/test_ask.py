"""What `kvrelay ask` reads and prints."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay import ask
from kvrelay.answer_printer import AnswerPrinter
from kvrelay.client import AnswerEvent, AsyncClient
from kvrelay.client_command import write
from kvrelay.errors import InvalidRequestError, UnavailableError
from kvrelay.inference import RequestAccepted, TextPrompt, TokensGenerated
from kvrelay.sampling import GeneratedToken
from kvrelay.structured import StructuredOutput, StructureKind
from kvrelay.structured_arguments import add_structured_arguments, structured_of
from tests.support.coordinator_ends import ends
from tests.support.fake_nodes import ANSWER_IDS, ANSWER_TEXT
from tests.support.fault_proxy import FaultProxy


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


@pytest.mark.parametrize("address", ["", "foo", "127.0.0.1:99999", "http://a:1"])
def test_what_is_no_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ask.main(["hello", "--address", address])
    assert caught.value.code == 2
    assert f"{address!r} is no address; give host:port, such as 127.0.0.1:7400" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:7400"])
def test_nobody_there(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main(["hello", "--address", address]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"kvrelay ask: no coordinator answers at {address}; start a cluster with `kvrelay up`, or name it by "
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
        (["hello", "--timeout", "-1"], "--timeout is -1; allowed is a number of seconds over 0"),
        (["hello", "--n", "0"], "n is 0; allowed is [1, 128]"),
        (["hello", "--n", "129"], "n is 129; allowed is [1, 128]"),
        (
            ["hello", "--keep-s", "60"],
            "keep_s is 60, but the request has no request_id to find its answer by; choose one",
        ),
        (["hello", "--keep-s", "601", "--request-id", "a"], "keep_s is 601; allowed is [0, 600] seconds"),
        (["hello", "--priority", "101"], "priority is 101; allowed is [-100, 100]"),
        (["hello", "--ttft-target", "0"], "ttft_target_s is 0; allowed is a number of seconds over 0"),
        (["hello", "--itl-target", "inf"], "itl_target_s is inf; allowed is a number of seconds over 0"),
        (["hello", "--timeout", "nan"], "--timeout is nan"),
        (["hello", "--timeout", "inf"], "--timeout is inf"),
        (["--prompt-ids", "1,x"], "'x' is no token id"),
        (["hello", "--logprobs", "2"], "--logprobs are only shown by --json"),
    ],
)
def test_contradictions(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("bias", ["5", "5=x", "=1", "x=1", "1,2=3"])
def test_what_is_no_bias(bias: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ask.main(["hello", "--logit-bias", bias])
    assert f"'{bias}' is no bias; write ID=X" in capsys.readouterr().err


async def ask_held(*flags: str) -> StructuredOutput | None:
    """What the nodes are told that the answer to `kvrelay ask` is held to."""
    async with ends() as cluster:
        assert await asyncio.to_thread(ask.main, ["hello", "--address", cluster.address, *flags]) == 0
        held = [request.sampling.structured for node in cluster.nodes for request in node.requests]
    assert len(set(held)) == 1
    return held[0]


async def test_what_the_answer_is_held_to_reaches_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert await ask_held() is None
    assert await ask_held("--json-schema", f"@{tmp_path}/schema.json") == StructuredOutput(
        StructureKind.JSON_SCHEMA, '{"type": "object"}'
    )
    assert await ask_held("--choice", "yes", "--choice", "no") == StructuredOutput(
        StructureKind.CHOICE, choices=("yes", "no")
    )


@pytest.mark.parametrize(
    ("flags", "held"),
    [
        (["--json-object"], StructuredOutput(StructureKind.JSON_OBJECT)),
        (["--json-schema", "{}"], StructuredOutput(StructureKind.JSON_SCHEMA, "{}")),
        (["--regex", "a+"], StructuredOutput(StructureKind.REGEX, "a+")),
        (["--grammar", 'start: "a"'], StructuredOutput(StructureKind.GRAMMAR, 'start: "a"')),
        ([], None),
    ],
)
def test_what_an_answer_is_held_to(flags: list[str], held: StructuredOutput | None) -> None:
    parser = argparse.ArgumentParser()
    add_structured_arguments(parser)
    assert structured_of(parser.parse_args(flags)) == held


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--regex", "a", "--json-object"], "not allowed with argument"),
        (["--grammar", "@/no/such/file"], "--grammar names, /no/such/file: No such file or directory\n"),
        (["--choice", ""], "choice holds an empty string"),
    ],
)
def test_what_an_answer_cannot_be_held_to(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert ask.main(["hello", *flags]) == 2
    assert words in capsys.readouterr().err


async def test_what_ends_an_answer_early_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    async def events() -> AsyncIterator[AnswerEvent]:
        yield TokensGenerated((GeneratedToken(4),), "half an ans")
        raise UnavailableError("gone")

    with pytest.raises(UnavailableError):
        await ask._collect(events(), AnswerPrinter(1, write))
    assert capsys.readouterr().out == "half an ans\n"


async def test_a_coordinator_that_goes_away_in_the_middle_is_named() -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        with FaultProxy(int(cluster.address.rpartition(":")[2]), frames=False) as proxy:
            async with AsyncClient(proxy.address) as client:
                events = client.generate(TextPrompt("hello"))
                assert isinstance(await anext(events), RequestAccepted)
                await asyncio.to_thread(proxy.cut)
                with pytest.raises(UnavailableError) as caught:
                    await anext(events)
    said = caught.value.message
    assert said.startswith(f"the coordinator at {proxy.address} went away in the middle of the answer (")
    assert said.endswith("); ask again, or another one")


async def test_no_whole_answer_in_the_time_given(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        argv = ["hello", "--timeout", "0.3", "--address", cluster.address]
        assert await asyncio.to_thread(ask.main, argv) == 1
    assert capsys.readouterr().err == f"kvrelay ask: no whole answer from {cluster.address} in the time given\n"


async def test_against_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        address = ["--address", cluster.address]

        assert await asyncio.to_thread(ask.main, ["hello", "--system", "x" * 80, *address]) == 0
        answer, facts = capsys.readouterr().out.rstrip().split("\n\n")
        assert answer == ANSWER_TEXT
        assert "tokens out (stop)" in facts
        assert "KV handed over 4.0 KiB" in facts

        flags = ["--json", "--prompt-ids", "1,2,3", "--max-tokens", "4", "--temperature", "0", "--logit-bias", "5=-1.5"]
        assert await asyncio.to_thread(ask.main, [*flags, "--stop-token-ids", "9", "--stop", "zz", *address]) == 0
        described = json.loads(capsys.readouterr().out)
        assert described["token_ids"] == list(ANSWER_IDS[:4])
        sampling = cluster.decode[0].requests[-1].sampling
        assert (sampling.temperature, sampling.logit_bias, sampling.stop_token_ids) == (0.0, {5: -1.5}, (9,))

        assert await asyncio.to_thread(ask.main, ["hello", "--top-p", "2", *address]) == 1
        assert capsys.readouterr().err == "kvrelay ask: top_p is 2.0; allowed is (0, 1]\n"


async def test_a_kept_answer_is_read_again_by_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        node = cluster.decode[0]
        node.at["token"].hold()
        asked = ["hello", "--keep-s", "60", "--request-id", "mine", "--address", cluster.address]
        assert await asyncio.to_thread(ask.main, [*asked, "--timeout", "0.3"]) == 1  # the request outlives its call
        node.at["token"].let_go()
        capsys.readouterr()
        for _ in range(2):
            assert await asyncio.to_thread(ask.main, asked) == 0
            assert capsys.readouterr().out.startswith(f"{ANSWER_TEXT}\n\n")
        assert len(node.requests) == 1
        assert await asyncio.to_thread(ask.main, asked[:1] + asked[3:]) == 1
        assert "the id 'mine' is that of a request" in capsys.readouterr().err


async def test_several_answers_against_a_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        argv = ["hello", "--n", "2", "--max-tokens", "4", "--seed", "7", "--address", cluster.address]

        assert await asyncio.to_thread(ask.main, argv) == 0
        first, second, facts = capsys.readouterr().out.rstrip().split("\n\n")
        assert first == f"--- 1 of 2 ---\n{ANSWER_TEXT[:4]}"
        assert second == f"--- 2 of 2 ---\n{ANSWER_TEXT[:4]}"
        assert "| 2 answers, 8 tokens out (2 length) |" in facts

        assert await asyncio.to_thread(ask.main, [*argv, "--json"]) == 0
        described = json.loads(capsys.readouterr().out)
        assert [choice["index"] for choice in described["choices"]] == [0, 1]
        assert {tuple(choice["token_ids"]) for choice in described["choices"]} == {ANSWER_IDS[:4]}
        assert described["choices"][1]["seed"] == 2752974492218918672
