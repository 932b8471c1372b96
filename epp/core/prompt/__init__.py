"""Parsing of a request's body, and hashing of its prompts into chains of block hashes."""
