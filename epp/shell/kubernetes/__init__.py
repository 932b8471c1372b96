"""Touches the API server: lists, watches, the Lease, Events."""
