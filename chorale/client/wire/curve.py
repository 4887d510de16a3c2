"""TCP sockets that other machines connect to, encrypted and authenticated with CurveZMQ.

An engine's public key is never sent in the clear, and clients get it only from the process that started the
engine. A program without the key can neither connect to the engine nor read its messages.
"""

from __future__ import annotations

import msgspec
import zmq


class TcpSocket(msgspec.Struct, frozen=True):
    """A listening TCP socket that the engine process inherits, so that a restart keeps its port."""

    fd: int
    secret_key: str


def new_keys() -> tuple[str, str]:
    """Returns a public and a secret key."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def serve(socket: zmq.Socket[bytes], secret_key: str) -> None:
    """Make a socket accept only clients that have the public key. Call before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key.encode())


def enter(socket: zmq.Socket[bytes], public_key: str) -> None:
    """Make a socket a client of the server with this key; "" has no effect. Call before it connects."""
    if public_key:
        own_public, own_secret = zmq.curve_keypair()
        socket.setsockopt(zmq.CURVE_SERVERKEY, public_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, own_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, own_secret)


def bind(socket: zmq.Socket[bytes], address: str, tcp: TcpSocket | None) -> None:
    """Bind to ``address``, and to the inherited TCP socket if there is one."""
    if tcp is not None:
        serve(socket, tcp.secret_key)
    socket.bind(address)
    if tcp is not None:
        listen(socket, tcp.fd)


def listen(socket: zmq.Socket[bytes], fd: int) -> None:
    """Accept connections on a TCP socket that listens already."""
    socket.setsockopt(zmq.USE_FD, fd)
    socket.bind("tcp://127.0.0.1:*")  # the address is not used: the descriptor is already bound
    socket.setsockopt(zmq.USE_FD, -1)
