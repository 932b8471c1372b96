"""KV-cache events of engines: decoding, streams with gaps, and translation into our own keys."""
