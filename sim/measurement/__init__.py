"""Measurements of runs, and their confidence intervals."""
