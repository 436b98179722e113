from __future__ import annotations

import socket

import pytest

from ds_launch.errors import LaunchError
from ds_launch.ports import DEFAULT_PORT, reserve_port


def listen(family: int, address: str, port: int = 0) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen()
    return server


@pytest.mark.parametrize(
    ("family", "address"),
    [
        (socket.AF_INET, "127.0.0.1"),
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::1"),
        (socket.AF_INET6, "::"),
    ],
)
def test_requested_port_in_use(family: int, address: str) -> None:
    try:
        server = listen(family, address)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server, pytest.raises(LaunchError, match="another process listens"):
        reserve_port(server.getsockname()[1])


def test_requested_port_of_another_launch() -> None:
    first = reserve_port(None)
    try:
        with pytest.raises(LaunchError, match="another `ds run`"):
            reserve_port(first.port)
    finally:
        first.close()
    reserve_port(first.port).close()


def test_reservations_differ() -> None:
    reservations = [reserve_port(None) for _ in range(5)]
    ports = [reservation.port for reservation in reservations]
    assert len(set(ports)) == 5
    assert min(ports) >= DEFAULT_PORT
    for reservation in reservations:
        reservation.close()


def test_reserved_port_can_be_listened_on() -> None:
    reservation = reserve_port(None)
    with listen(socket.AF_INET, "0.0.0.0", reservation.port):
        pass
    reservation.close()


def test_lingering_connection_does_not_count() -> None:
    server = listen(socket.AF_INET, "127.0.0.1")
    port = server.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = server.accept()
    accepted.close()  # the server closes first, so its side lingers in TIME_WAIT
    client.close()
    server.close()
    reserve_port(port).close()
