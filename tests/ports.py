"""Ports at which processes of torchrun meet."""

import contextlib
import socket


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("localhost", 0))
        return [str(one.getsockname()[1]) for one in sockets]
