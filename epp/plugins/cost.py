"""Conversion of candidates' costs to scores: the lowest cost scores 1, and a lower cost never
scores less than a higher one.
"""

import math

import numpy as np

from epp.core.knowledge.candidates import Floats


def scores_of_cost(cost: Floats) -> Floats:
    """Return float64[n] in [0, 1], from 1 for the lowest `cost` to 0 for the highest; all 1 if
    equal.

    `cost` is float64[n]. A cost that is not finite scores 0 if any other is finite, and the highest
    finite cost then scores more than 0. Equal costs score the same, so that the picker breaks ties.
    """
    # argmin and argmax take a third of the time of min and max. If there is a NaN, both return its
    # position.
    least = cost.item(cost.argmin())
    most = cost.item(cost.argmax())
    if not math.isfinite(most - least):
        finite = np.isfinite(cost)
        if not finite.any():
            return np.ones(len(cost))
        least = float(cost[finite].min())
        most = float(cost[finite].max())
        # An unknown cost ranks behind the worst known one, even if all known costs are close.
        most += max(most - least, 1.0)
        cost = np.where(finite, cost, most)
    if not most > least:
        return np.ones(len(cost))
    # Bounds are arrays, because numpy takes longer to convert a Python float than to subtract a
    # hundred values.
    scores: Floats = np.subtract(np.array(most), cost)
    scores /= np.array(most - least)
    return scores
