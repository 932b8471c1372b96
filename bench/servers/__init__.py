"""Servers that do nothing: each gives a picker's answers at the least cost of its transport."""
