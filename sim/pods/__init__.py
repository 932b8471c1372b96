"""Simulated pods that serve HTTP like vLLM: the API for clients and the metrics page for scrapers."""
