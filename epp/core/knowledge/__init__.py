"""The picker's knowledge about each endpoint: scraped values and estimates in columns by slot, and
cached prompts in affinity indexes.
"""
