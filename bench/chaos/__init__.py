"""The cost of each fault for clients, behind a real Envoy, with the default configuration."""
