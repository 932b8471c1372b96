"""The simulator: it runs the same scheduler core as the picker, with simulated pods and replayed
traffic.
"""
