"""Parsing of a body into a request, and hashing of its prompts into chains of blocks."""
