"""Text to settings: the `EndpointPickerConfig`, the flags, and what both are checked by."""
