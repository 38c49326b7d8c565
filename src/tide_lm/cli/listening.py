"""Places to listen at."""

import socket

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def check_free(host: str, port: int) -> None:
    """Check that the port is free, before a model is loaded for nothing."""
    if not host:
        raise ValueError("--host is empty: give an address, such as 127.0.0.1")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        told = f"{host}:{port} cannot be listened at ({error.strerror or error})"
        raise ValueError(f"{told}: choose another --port or --host") from error
