"""The part of the picker that has I/O: network, files and clocks. It makes no routing decisions."""
