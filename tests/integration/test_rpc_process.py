"""A role's process: what it prints, how it stops, and its exit codes. The role is tests/support/fake_role.py."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.errors import InvalidRequestError, UnavailableError
from kvrelay.role_config import RoleConfig
from kvrelay.rpc import process, raw
from kvrelay.rpc.calls import Replies, answer
from kvrelay.rpc.channel import open_channel
from tests.support.fake_role import SERVICE

TIMEOUT_S = 60.0  # of a process, its start included, on a busy machine
ROOT = Path(__file__).resolve().parents[2]


class Running:
    """The process under test; `lines` is what it has said on stderr so far."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.lines: list[str] = []

    async def ready_address(self) -> str:
        assert self.child.stdout is not None
        line = (await self.child.stdout.readline()).decode()
        match = re.fullmatch(r"READY kvstore (127\.0\.0\.1:\d+)\n", line)
        assert match, (line, await self.rest())
        return match[1]

    async def saw(self, text: str) -> str:
        """The next line on stderr that holds `text`."""
        assert self.child.stderr is not None
        while line := (await self.child.stderr.readline()).decode():
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in {self.lines}")

    async def rest(self) -> str:
        """Everything it said on stderr, once it has ended."""
        assert self.child.stderr is not None
        self.lines.append((await self.child.stderr.read()).decode())
        return "".join(self.lines)

    def terminate(self) -> None:
        self.child.send_signal(signal.SIGTERM)


@asynccontextmanager
async def fake_role(*argv: str, **environ: str) -> AsyncIterator[Running]:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error", "-m", "tests.support.fake_role", *argv),
        cwd=ROOT,
        env=os.environ | environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield Running(child)
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


@asynccontextmanager
async def holding(address: str) -> AsyncIterator[Replies[bytes]]:
    """A call that is running on the process."""
    async with (
        open_channel(address) as channel,
        Replies(raw.unary_stream(channel, SERVICE, "Hold")(b""), bytes) as replies,
    ):
        assert await anext(replies) == b"held"
        yield replies


async def test_a_port_that_other_machines_reach_in_the_clear_is_warned_of() -> None:
    async with fake_role("--host", "0.0.0.0") as wide, fake_role() as narrow:
        assert "WARNING" in await wide.saw("open to other machines without TLS")
        await narrow.ready_address()
        narrow.terminate()
        assert "open to other machines" not in await narrow.rest()


async def test_it_says_ready_serves_health_and_exits_cleanly_on_sigterm() -> None:
    async with fake_role() as running:
        address = await running.ready_address()
        async with open_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                request = health_pb2.HealthCheckRequest(service=service)
                assert await answer(stub.Check(request), lambda reply: reply.status) == 1
        running.terminate()

        assert await running.child.wait() == 0
        assert "DRAINING\nCLOSED\n" in await running.rest()
        assert running.child.stdout is not None
        assert await running.child.stdout.read() == b""


async def test_sigint_stops_it_as_well() -> None:
    async with fake_role() as running:
        await running.ready_address()
        running.child.send_signal(signal.SIGINT)

        assert await running.child.wait() == 0


async def test_running_calls_finish_within_the_grace_period_and_health_says_not_serving() -> None:
    async with fake_role("--hold-s", "3600") as running:
        address = await running.ready_address()
        async with holding(address) as replies:
            running.terminate()
            await running.saw("DRAINING")
            async with open_channel(address) as channel:
                request = health_pb2.HealthCheckRequest()
                check = health_pb2_grpc.HealthStub(channel).Check(request)
                assert await answer(check, lambda reply: reply.status) == 2
                async with Replies(raw.unary_stream(channel, SERVICE, "Hold")(b"let go"), bytes) as nothing:
                    assert [message async for message in nothing] == []
            assert [message async for message in replies] == [b"done"]

        assert await running.child.wait() == 0


async def test_calls_that_outlast_the_grace_period_are_cut() -> None:
    async with fake_role("--hold-s", "3600", "--grace-s", "0.2") as running:
        async with holding(await running.ready_address()) as replies:
            running.terminate()
            with pytest.raises(UnavailableError):
                await anext(replies)

        assert await running.child.wait() == 0
        assert "stopping before all work was done" in await running.rest()


async def test_a_second_signal_hastens_the_drain() -> None:
    async with fake_role("--hold-s", "3600", "--grace-s", "3600") as running:
        async with holding(await running.ready_address()) as replies:
            running.terminate()
            await running.saw("DRAINING")
            running.terminate()
            with pytest.raises(UnavailableError):
                await anext(replies)

        assert await running.child.wait() == 0
        assert "CLOSED" in await running.rest()


async def test_calls_that_a_hastened_drain_fails_still_hear_why() -> None:
    async with fake_role("--hold-s", "3600", "--grace-s", "3600", "--last-words") as running:
        async with holding(await running.ready_address()) as replies:
            running.terminate()
            await running.saw("DRAINING")
            running.terminate()
            assert [message async for message in replies] == [b"told"]

        assert await running.child.wait() == 0


async def test_signals_do_not_cut_short_what_closes_the_process() -> None:
    async with fake_role("--failure", "slow-close") as running:
        await running.ready_address()
        running.terminate()
        for stage in ("CLOSING", "EXITING"):
            await running.saw(stage)
            running.terminate()

        assert await running.child.wait() == 0
        assert (await running.rest()).endswith("EXITED\n")


async def test_a_health_watcher_does_not_hold_up_the_exit() -> None:
    async with fake_role("--grace-s", "3600") as running, open_channel(await running.ready_address()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        async with Replies(watch, lambda reply: reply.status) as statuses:
            assert await anext(statuses) == 1
            running.terminate()
            assert [status async for status in statuses] == [2]
            assert await running.child.wait() == 0


async def test_a_signal_during_a_slow_start_stops_it_without_a_drain() -> None:
    async with fake_role("--failure", "slow-start") as running:
        await running.saw("STARTING")
        running.terminate()

        assert await running.child.wait() == 0
        assert (await running.rest()).endswith("STARTING\nCLOSED\n")


async def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with fake_role("--port", str(port)) as running:
            assert await running.child.wait() == 2
            error = await running.rest()

    line = f"kvrelay kvstore: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    assert error.removeprefix("CLOSED\n") == line


@pytest.mark.parametrize(
    ("argv", "environ", "code", "error"),
    [
        (["--port", "x"], {}, 2, "--port is 'x'; allowed is a whole number from 0 to 65535"),
        ([], {"KVRELAY_KVSTORE_HOLDS": "1"}, 2, "KVRELAY_KVSTORE_HOLDS is no setting of kvstore; did you mean hold_s?"),
        (["--host", "203.0.113.7"], {}, 2, "cannot listen on 203.0.113.7 port 0: Cannot assign requested address"),
        (["--failure", "model"], {}, 1, "model.gguf is truncated"),
    ],
)
async def test_what_keeps_it_from_starting_is_one_line_and_an_exit_code(
    argv: list[str], environ: dict[str, str], code: int, error: str
) -> None:
    async with fake_role(*argv, **environ) as running:
        assert await running.child.wait() == code
        assert (await running.rest()).removeprefix("CLOSED\n") == f"kvrelay kvstore: {error}\n"


async def test_a_fault_of_ours_shows_its_traceback_and_exits_with_1() -> None:
    async with fake_role("--failure", "bug") as running:
        assert await running.child.wait() == 1
        assert "ZeroDivisionError" in await running.rest()


async def test_a_failing_clean_up_is_logged_and_the_exit_stays_clean() -> None:
    async with fake_role("--failure", "close") as running:
        await running.ready_address()
        running.terminate()

        assert await running.child.wait() == 0
        assert "cannot close kvstore" in await running.rest()


NONE_OPEN = 'kvrelay_rpc_calls_open{method="Hold"} 0.0'


async def test_metrics_are_served_over_http() -> None:
    async with fake_role("--metrics-port", "0") as running:
        url = (await running.saw("metrics on")).split("metrics on ")[1].strip()
        async with open_channel(await running.ready_address()) as channel:
            with pytest.raises(InvalidRequestError):
                await anext(Replies(raw.unary_stream(channel, SERVICE, "Hold")(b"bad"), bytes))
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
        while NONE_OPEN not in text:  # the client hears of the error a moment before the server is done with the call
            text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
        running.terminate()

        assert 'role="kvstore"' in text
        assert 'kvrelay_rpc_errors_total{code="invalid_request",method="Hold"} 1.0' in text
        assert await running.child.wait() == 0


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("127.0.0.1", "", "127.0.0.1:7420"),
        ("::1", "", "[::1]:7420"),
        ("0.0.0.0", "", f"{socket.gethostname()}:7420"),
        ("0.0.0.0", "decode-1", "decode-1:7420"),
        ("0.0.0.0", "decode-1:9000", "decode-1:9000"),
        ("0.0.0.0", "[fd00::1]:9000", "[fd00::1]:9000"),
        ("0.0.0.0", "fd00::1", "[fd00::1]:7420"),
    ],
)
def test_the_address_told_to_others(host: str, advertise: str, address: str) -> None:
    assert process.advertised_address(RoleConfig(host=host, advertise=advertise), 7420) == address


PAGE_FAULTS_OF_LARGE_MESSAGES = """
import resource, sys
from kvrelay.rpc.process import tune_malloc

def come_and_go():
    messages = [b"x" * 2**22 for _ in range(8)]

if "tuned" in sys.argv:
    tune_malloc()
come_and_go()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    come_and_go()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*argv: str) -> int:
    command = [sys.executable, "-c", PAGE_FAULTS_OF_LARGE_MESSAGES, *argv]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    return int(subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_of_large_messages_is_kept_once_malloc_is_tuned() -> None:
    assert page_faults() > 10_000
    assert page_faults("tuned") < 1_000
