"""Measurements of simulated runs, and their confidence intervals."""
