"""The demo that `make demo` runs: the same conversations through a real Envoy, by round robin and
by Homing.
"""
