"""Determine the tokens of prompts, by the engine's renderer or by a worker process."""
