"""Ports for roles that are yet to start."""

from __future__ import annotations

import socket

import pytest

from tests.support.cluster import free_port


def test_no_two_are_the_same_and_none_is_taken() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    with socket.create_server(("127.0.0.1", free_port())):
        pass


def test_where_none_can_be_listened_on_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, address: object) -> None:
            raise PermissionError("not here")

    monkeypatch.setattr(socket, "socket", Refusing)
    with pytest.raises(RuntimeError, match="none of 2000 ports in turn can be listened on"):
        free_port()
