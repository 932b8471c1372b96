"""Access the model servers (engines): metrics pages, other pages, KV-cache events and
tokenization.
"""
