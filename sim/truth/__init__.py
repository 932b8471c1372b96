"""Recorded truth, one module a kind: a folder with an `engine.toml` in, judgements out."""
