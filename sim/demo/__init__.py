"""The demo of `make demo`: round robin against Homing through a real Envoy."""
