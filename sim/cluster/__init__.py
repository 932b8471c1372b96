"""Pods, pickers and clients in simulated time."""
