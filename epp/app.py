"""Composition root of `epp serve`."""
