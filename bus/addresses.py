"""Addresses: `tcp://host:port` and `ipc:///path`, checked, looked up, and made fit for others to connect to.

What ZeroMQ takes is a little other than what users write: it hides a host that does not exist, binds no names,
and says `0.0.0.0` when asked where it listens.
"""

from __future__ import annotations

import ipaddress
import socket

import anyio

from bus.errors import AddressInUse, InvalidAddress


def local_host_towards(address: str) -> str:
    """The IP of this machine's interface that reaches a `tcp://` address; the loopback's for loopback and `ipc://`.

    Sends nothing: it asks the kernel for the route. Blocks while a host name is looked up.

    Raises:
        InvalidAddress: bad syntax, unknown host, a wildcard, or no route to it.
    """
    host, port = connectable(address)
    if not host:
        return "127.0.0.1"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InvalidAddress(address, f"cannot be reached from here ({error.strerror})") from error
    except UnicodeError as error:
        raise InvalidAddress(address, f"{host} is no host name") from error


def advertised(bound: str, towards: str = "") -> str:
    """A bound address as others can connect to it: a wildcard becomes the interface that reaches `towards`.

    `towards` is an address of the peer that will connect; without it, the interface of the default route stands
    in, or the loopback on a machine that has none. An address with a concrete host, and `ipc://`, stay as they are.

    Raises:
        InvalidAddress: either address has a bad syntax, or `towards` cannot be reached.
    """
    host, port = parsed(bound)
    if not _is_wildcard(host):
        return bound
    if towards:
        return _formatted(local_host_towards(towards), port)
    # Addresses reserved for documentation (RFC 5737, RFC 3849): outside every local network, and sent nothing.
    for outside in ("tcp://192.0.2.1:9", "tcp://[2001:db8::1]:9"):
        try:
            return _formatted(local_host_towards(outside), port)
        except InvalidAddress:
            continue
    return _formatted("127.0.0.1", port)


def parsed(address: str) -> tuple[str, int]:
    """Host and port of a `tcp://` address; ("", 0) for `ipc://`."""
    scheme, found, rest = address.partition("://")
    if scheme == "ipc" and found and rest:
        return "", 0
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidAddress(address, "write an IPv6 host in brackets, tcp://[::1]:5870")
    if scheme != "tcp" or not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidAddress(address, "expected tcp://host:port with a port up to 65535, or ipc:///path")
    return host, int(port)


def connectable(address: str) -> tuple[str, int]:
    """What `parsed` gives, refusing what can be bound but not connected to."""
    host, port = parsed(address)
    if host and (_is_wildcard(host) or not port):
        raise InvalidAddress(address, "a wildcard host or port 0 can be bound, not connected to; name the real one")
    return host, port


async def only_ipv6(address: str) -> bool:
    """Whether libzmq needs its IPv6 switch to connect; names are looked up here because libzmq hides a failure."""
    host, port = connectable(address)
    if not host:
        return False
    return all(":" in found for found in await _looked_up(address, host, port))


async def bindable(address: str) -> str:
    """The address as libzmq binds it: it takes numbers, interfaces and `*`, but looks no name up.

    libzmq also replaces a Unix socket that somebody listens on; here that is AddressInUse.
    """
    host, port = parsed(address)
    if not host:
        if await _is_listening(address.removeprefix("ipc://")):
            raise AddressInUse(address)
        return address
    if host == "*" or _is_ip(host) or host in (name for _, name in socket.if_nameindex()):
        return address
    first = min(await _looked_up(address, host, port), key=lambda found: ":" in found)  # IPv4 if it has one
    return _formatted(first, port)


async def _looked_up(address: str, host: str, port: int) -> list[str]:
    """The IPs of a host."""
    try:
        return [entry[4][0] for entry in await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise InvalidAddress(address, f"unknown host {host} ({error.strerror})") from error
    except UnicodeError as error:
        raise InvalidAddress(address, f"{host} is no host name") from error


async def _is_listening(path: str) -> bool:
    try:
        async with await anyio.connect_unix(path):
            return True
    except OSError:
        return False


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_ipv6(endpoint: str) -> bool:
    """Whether libzmq needs its IPv6 switch to bind this."""
    return ":" in parsed(endpoint)[0]


def _is_wildcard(host: str) -> bool:
    return host == "*" or (_is_ip(host) and ipaddress.ip_address(host).is_unspecified)


def _formatted(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
