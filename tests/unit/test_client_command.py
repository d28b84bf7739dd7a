"""What commands say when no coordinator can be spoken to."""

from __future__ import annotations

import pytest

from kvrelay.client_command import explain_failure
from kvrelay.errors import UnauthenticatedError, UnavailableError

CONNECT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7400: "


@pytest.mark.parametrize(
    ("last_error", "said"),
    [
        ("Failed to connect to remote host: Connection refused", "no coordinator answers at h:1"),
        ("Socket closed", "h:1 closes the connection; if it speaks TLS"),
        (
            "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)",
            "what answers at h:1 speaks no gRPC; name the coordinator's gRPC port",
        ),
        (
            "Tls handshake failed (TSI_PROTOCOL_FAILURE): CERTIFICATE_VERIFY_FAILED",
            "h:1 shows a certificate that is not",
        ),
        ("Tls handshake failed (TSI_PROTOCOL_FAILURE): WRONG_VERSION_NUMBER", "what answers at h:1 does not speak TLS"),
    ],
)
def test_a_connection_that_fails_is_told_by_what_may_be_done(last_error: str, said: str) -> None:
    """In gRPC 1.85's words for each."""
    assert explain_failure(UnavailableError(CONNECT + last_error), "h:1").startswith(said)


def test_who_shows_no_key_is_told_where_commands_take_it_from() -> None:
    said = explain_failure(UnauthenticatedError("the API key is not known here"), "h:1")
    assert said == "the API key is not known here; commands take the key or the token from KVRELAY_API_KEY"
