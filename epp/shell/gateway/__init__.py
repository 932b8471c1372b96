"""Touches the gateway: gRPC, protobuf, TLS, health, the bootstrap for Envoy."""
