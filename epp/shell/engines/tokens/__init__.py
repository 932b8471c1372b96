"""Which tokens prompts become: asked of the engine's renderer, or worked out by a worker process."""
