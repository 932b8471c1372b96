"""Determine the token ids of prompts, by the engine's renderer or by a worker process."""
