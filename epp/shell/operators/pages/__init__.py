"""The operators' port: authorization, the queue in which pages are created, and the debug pages."""
