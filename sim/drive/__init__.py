"""Real requests to a live gateway, at the moments that a trace says."""
