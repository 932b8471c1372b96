"""Comparison of the simulator with recordings of real engines; one module per kind of recording."""
