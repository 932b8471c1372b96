"""Interfaces for operators: metrics, logs, debug pages, traces, captures and recorded decisions."""
