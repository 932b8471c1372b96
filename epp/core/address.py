"""Addresses of endpoints and peers: "ip:port", IPv6 in brackets."""


def host_of(address: str) -> str:
    """Its host, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """Its port. Raises `ValueError` where there is none."""
    return int(address.rpartition(":")[2])


def address_of(host: str, port: int) -> str:
    """As "ip:port", IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
