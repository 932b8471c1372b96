"""What is believed of each endpoint, in columns by slot and in affinity indexes."""
