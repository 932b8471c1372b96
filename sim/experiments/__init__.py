"""Runs, comparisons and sweeps: the commands that replay traces."""
