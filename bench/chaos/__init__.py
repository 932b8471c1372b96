"""What each fault costs those who ask, behind a real Envoy, with the configuration of the default."""
