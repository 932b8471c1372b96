"""Create trace spans of requests and export them to a collector."""
