"""One ext_proc stream: its events, its phases, and what passes through it."""
