"""The leaderboard: every strategy on every case, with the best of each and confidence intervals."""
