"""The exchange of decisions and load between the pickers of one pool. What a picker learns from
peers only improves its estimates, so any message may be lost.
"""
