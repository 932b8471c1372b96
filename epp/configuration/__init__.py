"""Configuration: the `EndpointPickerConfig`, the flags, and the checks of both."""
