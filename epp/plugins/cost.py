"""Costs as scores: who costs least gets 1, and the order of the others stays."""

import math

import numpy as np

from epp.core.knowledge.candidates import Floats


def scores_of_cost(cost: Floats) -> Floats:
    """float64[n] in [0, 1], from 1 for the least `cost` to 0 for the greatest; all equal: 1.

    `cost` is float64[n]. What is not finite scores 0 where anything is finite. Equal costs score the
    same, so that the picker breaks ties.
    """
    # Positions are found three times as fast as values; where there is a NaN, both lead to it.
    least = cost.item(cost.argmin())
    most = cost.item(cost.argmax())
    if not math.isfinite(most - least):
        finite = np.isfinite(cost)
        if not finite.any():
            return np.ones(len(cost))
        least = float(cost[finite].min())
        most = float(cost[finite].max())
        # Behind the worst that is known, however close to the best that is.
        most += max(most - least, 1.0)
        cost = np.where(finite, cost, most)
    if not most > least:
        return np.ones(len(cost))
    # As arrays: numpy takes a Python float longer than to subtract a hundred.
    scores: Floats = np.subtract(np.array(most), cost)
    scores /= np.array(most - least)
    return scores
