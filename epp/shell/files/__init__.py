"""Touches files: watches the configuration and the endpoints."""
