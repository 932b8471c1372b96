"""Servers that do nothing: each plays a picker's answers at the least cost of its transport."""
