"""Measurement of what each fault costs clients, behind a real Envoy, with the default
configuration.
"""
