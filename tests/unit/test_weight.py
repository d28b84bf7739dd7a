"""What `kvrelay weight` does and prints."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvrelay import weight
from kvrelay.errors import InvalidRequestError, UnavailableError
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.nodes import NodeClient
from tests.support.coordinator_ends import several_ends
from tests.support.fake_nodes import ANSWER_IDS


async def test_a_weight_reaches_every_coordinator_and_0_keeps_new_requests_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with several_ends(2, num_decode=2) as coordinators:
        cordoned, other = coordinators[0].decode
        assert await asyncio.to_thread(weight.main, [cordoned.address, "0"]) == 0
        assert capsys.readouterr() == (f"{cordoned.address} has weight 0: it takes nothing new\n", "")
        for one in coordinators:
            await one.until_status(lambda status: [node.status.weight for node in status.nodes] == [1.0, 0.0, 1.0])
            assert (await one.ask()).finished.decode_node == other.address
        assert await asyncio.to_thread(weight.main, [other.address, "0"]) == 0
        for one in coordinators:
            await one.until_status(lambda status: not status.ready)
            with pytest.raises(UnavailableError, match="every decode-node that is ready has weight 0"):
                await one.ask()
        capsys.readouterr()
        assert await asyncio.to_thread(weight.main, [cordoned.address, "2"]) == 0
        assert capsys.readouterr() == (f"{cordoned.address} has weight 2\n", "")
        assert await asyncio.to_thread(weight.main, [cordoned.address, "2.5", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"address": cordoned.address, "weight": 2.5}
        for one in coordinators:
            await one.until_status(lambda status: status.ready)
            assert (await one.ask()).finished.decode_node == cordoned.address


async def test_what_runs_on_a_node_of_weight_0_goes_on() -> None:
    async with several_ends(1, num_decode=2) as (one,):
        node = one.decode[0]
        for each in one.decode:
            each.at["token"].hold()
        asking = asyncio.create_task(one.ask())
        await asyncio.wait_for(node.until_reached("token"), 10)
        async with open_channel(node.address) as channel:
            assert await NodeClient(channel).set_weight(0.0) == 0.0
        await one.until_status(lambda status: status.nodes[1].status.weight == 0)
        node.at["token"].let_go()
        answer = await asking
        assert (answer.token_ids, answer.finished.retries) == (ANSWER_IDS, 0)


@pytest.mark.parametrize("value", [-0.5, 100.5, float("nan"), float("inf")])
async def test_a_weight_that_is_none_changes_nothing(value: float) -> None:
    async with several_ends(1) as (one,):
        async with open_channel(one.decode[0].address) as channel:
            with pytest.raises(InvalidRequestError, match=r"weight is .*; allowed is \[0, 100\]"):
                await NodeClient(channel).set_weight(value)
        assert one.decode[0].control.weight == 1.0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["127.0.0.1:1", "101"], "weight is 101; allowed is [0, 100]"),
        (["127.0.0.1:1", "nan"], "weight is nan"),
        (["127.0.0.1:1", "much"], "'much' is no number"),
        (["here", "1"], "'here' is no address"),
    ],
)
def test_a_command_line_that_makes_no_sense(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        weight.main(arguments)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert weight.main(["127.0.0.1:1", "1"]) == 1
    assert "no node answers at 127.0.0.1:1" in capsys.readouterr().err


async def test_what_answers_there_is_no_node(capsys: pytest.CaptureFixture[str]) -> None:
    async with several_ends(1) as (one,):
        assert await asyncio.to_thread(weight.main, [one.address, "1"]) == 1
    assert "it plays another role" in capsys.readouterr().err
