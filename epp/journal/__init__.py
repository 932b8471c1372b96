"""The journal of decisions and their inputs in files: its format and its reader, with readers of
older formats.
"""
