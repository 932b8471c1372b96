"""Prompt caches of engines other than vLLM for the simulator, one module each."""
