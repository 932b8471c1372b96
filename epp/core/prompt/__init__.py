"""A body to a request, a prompt to chained block hashes."""
