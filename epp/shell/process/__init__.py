"""Manage the picker's own process: memory, garbage collection, event loop and standard error."""
