"""The leaderboard: every routing strategy on every case, with the best strategy of each case and
confidence intervals.
"""
