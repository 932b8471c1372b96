"""Parsing and formatting of the addresses of endpoints and peers: "ip:port", with IPv6 in brackets."""


def host_of(address: str) -> str:
    """Return the host of `address`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """Return the port of `address`. Raises `ValueError` if `address` has none."""
    return int(address.rpartition(":")[2])


def address_of(host: str, port: int) -> str:
    """Return the address "ip:port" of `host` and `port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
