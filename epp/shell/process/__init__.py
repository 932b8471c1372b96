"""Touches our own process: its memory, its garbage, its event loop and what it prints when it fails."""
