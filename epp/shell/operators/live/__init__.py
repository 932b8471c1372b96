"""The current state of a picker, as JSON data and as a web page."""
