"""The current state of a picker, as data and as a web page."""
