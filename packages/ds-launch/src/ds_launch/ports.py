"""The port on which rank 0 will listen for the others."""

from __future__ import annotations

import errno
import socket

from ds_launch.errors import LaunchError

DEFAULT_PORT = 29500
_CANDIDATES = range(DEFAULT_PORT, DEFAULT_PORT + 200)


class PortReservation:
    """A free TCP port that no other ``ds run`` on this machine hands out while this object lives.

    Rank 0 binds the port seconds after it was found free, so two launches started together would
    both find the default one. The holder of a port therefore binds an abstract Unix socket named
    after it: that name is scoped to the network namespace like the port, and the kernel drops it
    with the process, however that ends.

    Attributes:
        port: The TCP port number.
    """

    def __init__(self, port: int, holder: socket.socket) -> None:
        self.port = port
        self._holder = holder

    def close(self) -> None:
        """Let other launches use the port."""
        self._holder.close()


def reserve_port(requested: int | None) -> PortReservation:
    """Reserve ``requested``, or the first free port from 29500 on when it is ``None``.

    Raises:
        LaunchError: The requested port is in use or may not be bound, or none is free.
    """
    if requested is not None:
        problem, reservation = _try(requested)
        if reservation is None:
            raise LaunchError(
                f"--master-port {requested} cannot be used: {problem}. Name a free port, or leave "
                "the option out to have one found."
            )
        return reservation
    for port in _CANDIDATES:
        _, reservation = _try(port)
        if reservation is not None:
            return reservation
    raise LaunchError(
        f"every port from {_CANDIDATES[0]} to {_CANDIDATES[-1]} is in use: name a free one with "
        "--master-port"
    )


def _try(port: int) -> tuple[str, PortReservation | None]:
    """Return why the port cannot be had, or its reservation."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        holder.bind(f"\0ds-launch.port.{port}")
    except OSError as error:
        holder.close()
        if error.errno != errno.EADDRINUSE:
            return f"its reservation failed ({error})", None
        return "another `ds run` on this machine uses it", None
    problem = _bind_problem(port)
    if problem:
        holder.close()
        return problem, None
    return "", PortReservation(port, holder)


def _bind_problem(port: int) -> str:
    """Bind the port on every address for a moment, as rank 0 will; return what went wrong."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the listener of torch does: a connection that lingers from the last job
                # (TIME_WAIT) does not count, a listening socket does.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
                # Two sockets with SO_REUSEADDR may share a bound port until one listens.
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno in (
                errno.EAFNOSUPPORT,
                errno.EADDRNOTAVAIL,
            ):
                continue  # a machine without IPv6
            if error.errno == errno.EADDRINUSE:
                return "another process listens on it"
            return error.strerror or str(error)
    return ""
