"""Configuration: the `EndpointPickerConfig`, its checks, and its translation into settings of the
scheduler.
"""
