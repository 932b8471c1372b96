"""The protocol of one ext_proc stream: its events, its phases and its answers."""
