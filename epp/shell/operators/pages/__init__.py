"""The operators' port: authorization, the queue of pages, and the debug pages."""
