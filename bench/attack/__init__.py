"""Attacks on a running picker, and what those who meant no harm had to bear meanwhile."""
