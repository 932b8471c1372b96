"""Every strategy on every case: who is best where, and how surely."""
