"""Subcommands of `epp`, one module per subcommand."""
