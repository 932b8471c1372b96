"""Prompt caches besides vLLM's block pool for the simulator, one module each."""
