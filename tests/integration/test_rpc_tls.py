"""Mutual TLS: a handoff works over it, and nobody without the right certificate calls anything."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decode_node.service import DecodeService
from kvrelay import weight
from kvrelay.certificates import make_certificates
from kvrelay.errors import ConfigError, UnavailableError
from kvrelay.kv.remote_admin import StoreAdmin
from kvrelay.messages import TokensDecoded
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.connection import Connection
from kvrelay.rpc.credentials import ChannelTLS, ClientTLS, DoorTLS, MutualTLS, PeerTLS, peer_tls_of
from kvrelay.rpc.nodes import DecodeClient
from kvrelay.rpc.server import bind, make_server
from kvrelay.types import ReservationId
from tests.support.decode_harness import Handoff, Harness, decode_node, hand_over
from tests.support.fake_engine import make_info, make_request

TIMEOUT_S = 60.0


def read_new(directory: Path) -> MutualTLS:
    make_certificates(directory)
    return read(directory)


def read(directory: Path, name: str = "decode-node") -> MutualTLS:
    return MutualTLS.read(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> MutualTLS:
    return read_new(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign_tls(tmp_path_factory: pytest.TempPathFactory) -> MutualTLS:
    """Of another CA by the same name."""
    return read_new(tmp_path_factory.mktemp("tls") / "theirs")


@asynccontextmanager
async def node_behind(tls: MutualTLS | PeerTLS) -> AsyncIterator[Harness]:
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


async def refusal(address: str, tls: ChannelTLS | None) -> str:
    """Why a client that has these credentials cannot call the node."""
    async with open_channel(address, own_connection=True, tls=tls) as channel:
        with pytest.raises(UnavailableError) as refused:
            await DecodeClient(channel).release(ReservationId("none"), TIMEOUT_S)
    return refused.value.message


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


async def test_a_client_without_a_certificate_is_refused(tls: MutualTLS) -> None:
    async with node_behind(tls) as node:
        await refusal(node.address, None)
        await refusal(node.address, replace(tls, certificate=b"", key=b""))


async def test_commands_without_a_certificate_are_told_to_name_one(
    tls: MutualTLS, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node_behind(tls) as node:
        assert await asyncio.to_thread(weight.main, [node.address, "1"]) == 1
        assert f"kvrelay weight: {node.address} ends the TLS handshake" in capsys.readouterr().err
        async with StoreAdmin(node.address) as admin:
            with pytest.raises(UnavailableError, match="name those of one by KVRELAY_PEER_CA"):
                await admin.stats()


async def test_commands_with_a_certificate_where_nobody_has_one_are_told_to_leave_it_out(tls: MutualTLS) -> None:
    async with decode_node() as node, StoreAdmin(node.address, tls=tls) as admin:
        with pytest.raises(UnavailableError, match="where they have none, unset these"):
            await admin.stats()


async def test_a_client_whose_certificate_another_ca_signed_is_refused(tls: MutualTLS, foreign_tls: MutualTLS) -> None:
    """Also one that trusts our CA: it is the server that refuses."""
    async with node_behind(tls) as node:
        await refusal(node.address, replace(foreign_tls, ca=tls.ca))


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


def peer(directory: Path, name: str = "decode-node") -> PeerTLS:
    return PeerTLS(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")


async def test_the_certificate_of_the_clients_port_lets_nobody_in_as_a_node(tmp_path: Path) -> None:
    """It is signed by the same CA, for servers."""
    make_certificates(tmp_path)
    async with node_behind(peer(tmp_path)) as node:
        await refusal(node.address, read(tmp_path, "door"))


async def test_a_server_takes_up_new_certificates_without_a_restart(tmp_path: Path) -> None:
    """Of another CA even: who was refused is let in, and who was let in is refused."""
    make_certificates(tmp_path / "used")
    make_certificates(tmp_path / "new")
    old, new = read(tmp_path / "used"), read(tmp_path / "new")
    async with node_behind(peer(tmp_path / "used")) as node:
        await refusal(node.address, new)
        for file in (tmp_path / "new").iterdir():
            file.replace(tmp_path / "used" / file.name)
        async with open_channel(node.address, own_connection=True, tls=new) as channel:
            await DecodeClient(channel).release(ReservationId("none"), TIMEOUT_S)
        await refusal(node.address, old)


async def test_a_connection_dials_with_new_certificates_and_leaves_running_calls_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    async with node_behind(peer(tmp_path)) as node:
        connection = Connection(node.address, own_connection=True, tls=peer(tmp_path))
        before = connection.channel
        request = make_request(tuple(range(10, 20)), max_tokens=4)
        granted = await DecodeClient(before).reserve(request, 14, TIMEOUT_S)
        assert connection.channel is before
        make_certificates(tmp_path)
        after = connection.channel
        assert after is not before
        received = await hand_over(node, Handoff(make_info(), request, granted).messages())
        assert received[-1].committed
        async with DecodeClient(before).decode(granted.reservation_id, timeout_s=TIMEOUT_S) as events:
            assert isinstance(await anext(events), TokensDecoded)
            await DecodeClient(after).release(ReservationId("none"), TIMEOUT_S)
            assert [event async for event in events]
        await connection.close()


async def test_the_clients_port_shows_a_certificate_and_asks_for_none(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    service, server = DecodeService(), make_server()
    service.register(server)
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, DoorTLS(tmp_path / 'door.pem', tmp_path / 'door.key'))}"
    await server.start()
    try:
        client = ClientTLS.read(tmp_path / "ca.pem")
        async with open_channel(address, own_connection=True, tls=client) as channel:
            with pytest.raises(UnavailableError, match="loading"):  # what the service itself says
                await DecodeClient(channel).release(ReservationId("none"), TIMEOUT_S)
        assert "loading" not in await refusal(address, None)
    finally:
        await server.stop(0)


def test_a_certificate_of_another_key_is_refused_at_the_start_and_not_taken_up_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path / "one")
    make_certificates(tmp_path / "two")
    tls = peer(tmp_path / "one")
    (tmp_path / "one" / "decode-node.key").write_bytes((tmp_path / "two" / "decode-node.key").read_bytes())
    assert tls.version == 0
    assert "stays in force" in caplog.text
    with pytest.raises(ConfigError, match=r"decode-node\.pem and .*decode-node\.key do not belong together"):
        peer(tmp_path / "one")


def test_settings_of_peers_belong_together() -> None:
    assert peer_tls_of({}) is None
    with pytest.raises(ConfigError, match="peer_key is missing"):
        peer_tls_of({"KVRELAY_PEER_CA": "ca.pem", "KVRELAY_PEER_CERT": "node.pem"})


async def test_http_shakes_hands_with_what_the_files_hold_then(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = DoorTLS(tmp_path / "door.pem", tmp_path / "door.key").of_http()

    async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close_at_once, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for _ in range(2):
            assert await shown_certificate(port) == (tmp_path / "door.pem").read_text()
            make_certificates(tmp_path)


async def shown_certificate(port: int) -> str:
    """In PEM; trusted unseen."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=TIMEOUT_S)
