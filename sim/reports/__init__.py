"""Reports of the simulator: tables for the terminal, Markdown files and HTML pages."""
