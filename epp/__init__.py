"""Homing, an endpoint picker (EPP) for Kubernetes inference gateways."""

from typing import Final

__version__: Final = "0.1.0"
