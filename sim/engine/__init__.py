"""A simulated vLLM engine: its blocks, its batches, and the duration of its steps."""
