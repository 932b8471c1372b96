"""The journal in files: its format and its reader, with readers of older formats."""
