"""Commands that replay traces: single runs, comparisons, sweeps, tuning and sizing."""
