"""What `kvrelay cancel` does and prints."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay import cancel
from kvrelay.errors import CancelledError
from tests.support.coordinator_ends import ends


@pytest.mark.parametrize(
    ("flags", "printed"),
    [([], "cancelled mine\n"), (["--json"], '{"request_id": "mine", "state": "cancelled"}\n')],
    ids=["text", "json"],
)
async def test_a_running_request_ends_and_its_caller_hears_of_it(
    flags: list[str], printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with ends() as cluster:
        cluster.decode[0].at["token"].hold()
        asking = asyncio.create_task(cluster.ask(request_id="mine"))
        await cluster.until_status(lambda status: status.num_running == 1)

        assert await asyncio.to_thread(cancel.main, ["mine", *flags, "--address", cluster.address]) == 0
        assert capsys.readouterr() == (printed, "")
        with pytest.raises(CancelledError, match="the request was cancelled"):
            await asking


async def test_a_request_that_does_not_run_is_one_line_and_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    async with ends() as cluster:
        assert await asyncio.to_thread(cancel.main, ["other", "--address", cluster.address]) == 1
    what = f"no request with the id 'other' is running at {cluster.address}; another coordinator may have it"
    assert capsys.readouterr() == ("", f"kvrelay cancel: {what}\n")


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cancel.main(["mine", "--address", "127.0.0.1:1"]) == 1
    assert "no coordinator answers at 127.0.0.1:1" in capsys.readouterr().err
