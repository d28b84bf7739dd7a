"""`kvrelay certs`."""

from __future__ import annotations

import json
import ssl
import stat
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvrelay import certs
from kvrelay.certificates import make_certificates
from kvrelay.errors import ConfigError

NAMES = ["coordinator", "prefill-node", "decode-node", "kvstore", "door"]


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_each_role_and_the_clients_port_has_one_that_the_ca_signed(tmp_path: Path) -> None:
    assert make_certificates(tmp_path, ["node-1.example", "10.0.0.7"], days=30) == NAMES
    for name in NAMES:
        one = load(tmp_path / f"{name}.pem")
        one.verify_directly_issued_by(load(tmp_path / "ca.pem"))
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["localhost", "node-1.example"]
        addresses = [IPv4Address("127.0.0.1"), IPv6Address("::1"), IPv4Address("10.0.0.7")]
        assert names.get_values_for_type(x509.IPAddress) == addresses
        assert timedelta(days=29) < one.not_valid_after_utc - datetime.now(UTC) < timedelta(days=31)


def test_what_was_made_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs.main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"directory": str(tmp_path), "names": NAMES}


def test_only_roles_have_one_to_dial_with(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    dials = {
        name: ExtendedKeyUsageOID.CLIENT_AUTH
        in load(tmp_path / f"{name}.pem").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        for name in NAMES
    }
    assert dials == {"coordinator": True, "prefill-node": True, "decode-node": True, "kvstore": True, "door": False}


def test_keys_are_their_owners(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*.key")} == {0o600}


def test_a_ca_that_is_there_signs_new_ones(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    ca, before = (tmp_path / "ca.pem").read_bytes(), load(tmp_path / "kvstore.pem")
    make_certificates(tmp_path)
    after = load(tmp_path / "kvstore.pem")
    assert (tmp_path / "ca.pem").read_bytes() == ca
    assert after.serial_number != before.serial_number
    after.verify_directly_issued_by(load(tmp_path / "ca.pem"))


def test_a_ca_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.key").write_text("no key")
    with pytest.raises(ConfigError, match=f"the CA in {tmp_path} cannot be used"):
        make_certificates(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        make_certificates(tmp_path / "file")


def test_the_command_says_what_goes_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certs.main([str(tmp_path), "--host", "node-1.example"]) == 0
    said = capsys.readouterr().out
    assert f"--peer-ca {tmp_path}/ca.pem --peer-cert {tmp_path}/ROLE.pem" in said
    assert f"--tls-cert {tmp_path}/door.pem" in said


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--days", "0"), "days is 0; allowed is 1 to 3650"),
        (("--days", "3651"), "days is 3651; allowed is 1 to 3650"),
        (("--host", ""), "a host is ''"),
        (("--host", "nöde"), "a host is 'nöde'"),
    ],
)
def test_what_no_certificate_could_say_is_refused(flags: tuple[str, str], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        certs.main([str(tmp_path), *flags])


@pytest.mark.parametrize("name", ["door", "decode-node"])
def test_they_pass_a_strict_client(name: str, tmp_path: Path) -> None:
    """As Python's own from 3.13 on, and what is built upon it."""
    make_certificates(tmp_path)
    strict = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tmp_path / f"{name}.pem", tmp_path / f"{name}.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = strict.wrap_bio(to_client, to_server, server_hostname="localhost")
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    client.do_handshake()
    server.do_handshake()
