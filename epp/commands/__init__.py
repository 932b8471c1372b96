"""What `epp` does when it does not serve: one module a subcommand."""
