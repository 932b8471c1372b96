"""Spans of requests, and how they reach a collector."""
