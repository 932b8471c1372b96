"""Simulated pods over HTTP, with the interfaces of an engine that clients and scrapers use."""
