"""KV-cache events of engines: decoding, event streams with gaps, and translation into the picker's
own keys.
"""
