"""What engines tell of their KV caches: bytes to events, a stream with gaps, and our keys."""
