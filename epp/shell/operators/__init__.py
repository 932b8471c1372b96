"""Touches those who run it: metrics, logs, debug pages."""
