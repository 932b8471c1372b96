"""Servers that do nothing: each gives a picker's answers at the lowest cost that its transport
allows.
"""
