"""Serve gateways: gRPC, protobuf messages, TLS, health checks, and the bootstrap configuration of
Envoy.
"""
