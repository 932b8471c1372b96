"""Attacks on a running picker, and their effect on requests of others."""
