"""A simulated vLLM engine: blocks, batches, and how long a step takes."""
