"""Bounded least squares, for the few unknown constants of a profile."""

from itertools import product

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


def bounded_least_squares(matrix: _Floats, wanted: _Floats, limits: _Floats) -> _Floats:
    """Return the vector x with 0 <= x <= `limits` that minimises the squares of `matrix @ x -
    wanted`.

    `limits` may be inf. The function tries every choice of free unknowns, with all others at a
    limit. The result is exact and takes up to 3**n small solutions for n unknowns, so n must be
    small.
    """
    best, least = np.zeros(len(limits)), np.inf
    choices = [
        ("free", "low", "high") if np.isfinite(limit) else ("free", "low") for limit in limits
    ]
    for states in product(*choices):
        x = np.where(np.array(states) == "high", limits, 0.0)
        free = np.array(states) == "free"
        if free.any():
            x[free] = np.linalg.lstsq(matrix[:, free], wanted - matrix @ x, rcond=None)[0]
        squares = float(np.sum((matrix @ x - wanted) ** 2))
        if squares < least and bool(np.all((x >= 0.0) & (x <= limits))):
            best, least = x, squares
    return best
