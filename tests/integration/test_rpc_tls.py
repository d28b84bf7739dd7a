"""Mutual TLS: a handoff works over it, and nobody without the right certificate calls anything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decode_node.service import DecodeService
from kvrelay.errors import ConfigError, UnavailableError
from kvrelay.messages import TokensDecoded
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.credentials import MutualTLS
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.rpc.server import bind, make_server
from kvrelay.types import ReservationId
from scripts.development_certificates import have_openssl, make_certificates
from tests.support.decode_harness import Handoff, Harness, decode_node, hand_over
from tests.support.fake_engine import make_info, make_request

TIMEOUT_S = 60.0

needs_openssl = pytest.mark.skipif(not have_openssl(), reason="there is no openssl command to make certificates with")


def read_new(directory: Path) -> MutualTLS:
    directory.mkdir()
    files = make_certificates(directory)
    return MutualTLS.read(files.ca, files.certificate, files.key)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> MutualTLS:
    return read_new(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign_tls(tmp_path_factory: pytest.TempPathFactory) -> MutualTLS:
    """Of another CA by the same name."""
    return read_new(tmp_path_factory.mktemp("tls") / "theirs")


@asynccontextmanager
async def node_behind(tls: MutualTLS) -> AsyncIterator[Harness]:
    """A decode node whose harness has these credentials, as the node itself does."""
    service, server = DecodeService(), make_server()
    service.register(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, tls)}"
    async with decode_node() as harness, open_channel(address, own_connection=True, tls=tls) as channel:
        service.node, harness.address = harness.node, address
        harness.channel, harness.client = channel, DecodeClient(channel)
        await server.start()
        try:
            yield harness
        finally:
            await server.stop(0)


async def refusal(address: str, tls: MutualTLS | None) -> str:
    """Why a client that has these credentials cannot call the node."""
    async with open_channel(address, own_connection=True, tls=tls) as channel:
        with pytest.raises(UnavailableError) as refused:
            await DecodeClient(channel).release(ReservationId("none"), TIMEOUT_S)
    return refused.value.message


@needs_openssl
async def test_a_handoff_works_over_mutual_tls(tls: MutualTLS) -> None:
    async with node_behind(tls) as node:
        request = make_request(tuple(range(10, 20)), max_tokens=4)
        granted = await node.client.reserve(request, 14, TIMEOUT_S)
        received = await hand_over(node, Handoff(make_info(), request, granted).messages())
        assert received[-1].committed
        async with node.client.decode(granted.reservation_id, timeout_s=TIMEOUT_S) as events:
            first = await anext(events)
        assert isinstance(first, TokensDecoded)
        assert first.tokens[0].token_id == 20


@needs_openssl
async def test_a_client_without_a_certificate_is_refused(tls: MutualTLS) -> None:
    async with node_behind(tls) as node:
        await refusal(node.address, None)
        await refusal(node.address, replace(tls, certificate=b"", key=b""))


@needs_openssl
async def test_a_client_whose_certificate_another_ca_signed_is_refused(tls: MutualTLS, foreign_tls: MutualTLS) -> None:
    """Also one that trusts our CA: it is the server that refuses."""
    async with node_behind(tls) as node:
        await refusal(node.address, replace(foreign_tls, ca=tls.ca))


@needs_openssl
async def test_a_server_whose_certificate_another_ca_signed_is_refused(tls: MutualTLS, foreign_tls: MutualTLS) -> None:
    """Also when it would take our certificate: it is the client that refuses."""
    async with node_behind(replace(foreign_tls, ca=tls.ca)) as node:
        assert "CERTIFICATE_VERIFY_FAILED" in await refusal(node.address, tls)


def test_files_that_are_missing_or_no_pem_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*/ca\.pem: No such file"):
        MutualTLS.read(tmp_path / "ca.pem", tmp_path / "node.pem", tmp_path / "node.key")
    (tmp_path / "ca.pem").write_text("not one")
    with pytest.raises(ConfigError, match=r"ca\.pem is not in PEM form"):
        MutualTLS.read(tmp_path / "ca.pem", tmp_path / "node.pem", tmp_path / "node.key")
