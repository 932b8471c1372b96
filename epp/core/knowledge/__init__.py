"""The state and the estimates of each endpoint, in columns by slot and in affinity indexes."""
