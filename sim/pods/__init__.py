"""Simulated pods over HTTP: what a client and a scraper see of an engine."""
