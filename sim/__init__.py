"""A simulator: a second shell round the same scheduler core, with simulated pods and replayed
traffic.
"""
