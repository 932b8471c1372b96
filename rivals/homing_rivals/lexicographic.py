"""Conversion of several costs, in order of importance, to scores."""

import numpy as np

from epp.plugins.contract import Floats, scores_of_cost


def scores_by_rank(*costs: Floats) -> Floats:
    """Return float64[n] in [0, 1]: 1 for the candidate with the lowest first cost, ties decided by
    the next cost, and so on.

    `costs` are finite float64[n], at least one. Candidates that are equal in all of them score the
    same. Scores show the order and not the distance, so rounding never hides a cost that breaks
    ties.
    """
    order = np.lexsort(costs[::-1])
    differs = np.zeros(len(order), dtype=np.bool_)
    for cost in costs:
        ordered = cost[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    ranks = np.empty(len(order))
    ranks[order] = np.cumsum(differs)
    return scores_of_cost(ranks)
