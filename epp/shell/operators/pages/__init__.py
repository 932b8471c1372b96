"""The port of operators: who may read, one page at a time, and the debug pages."""
