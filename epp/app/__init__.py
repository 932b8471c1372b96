"""Composition root of `epp serve`: what is built, when it is ready, and how it is reconfigured."""
