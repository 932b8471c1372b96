"""Comparison of the simulator with recordings of real engines (`sim validate`); one module for each
kind of recording.
"""
