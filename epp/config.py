"""`EndpointPickerConfig`: bytes to typed settings, or one sentence a problem."""
