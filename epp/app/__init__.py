"""Composition root of `epp serve`: construction, readiness and reconfiguration of the picker."""
