"""A second shell round the same core: simulated pods, replayed traffic."""
