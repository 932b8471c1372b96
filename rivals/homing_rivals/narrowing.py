"""Functions that narrow the candidates step by step; the remaining candidates score 1."""

import math

import numpy as np

from epp.plugins.contract import Bools, Floats, Ints


def only(kept: Bools) -> Floats:
    """Return float64[n]: score 1 for the candidates in `kept`, 0 for the others."""
    return kept.astype(np.float64)


def least_of(values: Floats | Ints, among: Bools | None = None) -> Bools:
    """Return bool[n]: True for the candidates in `among` (None means all) with the lowest of
    `values`; all False if `among` is empty.

    `values` are finite.
    """
    if among is None:
        among = np.ones(len(values), dtype=np.bool_)
    if not among.any():
        return among
    least: Bools = among & (values == values[among].min())
    return least


def most_of(values: Floats | Ints, among: Bools | None = None) -> Bools:
    """Return bool[n]: True for the candidates in `among` (None means all) with the highest of
    `values`; all False if `among` is empty.

    `values` are finite.
    """
    return least_of(-values, among)


def first_of(kept: Bools) -> Bools:
    """Return bool[n]: True only for the first candidate in `kept`; all False if `kept` is empty."""
    first = np.zeros(len(kept), dtype=np.bool_)
    first[kept.argmax()] = kept.any()
    return first


def with_room(inflight: Ints, load_factor: float) -> Bools:
    """Return bool[n]: True for candidates that, with this request, have at most ceil(`load_factor`
    * (total + 1) / n) requests in flight.

    At least one candidate is True with a factor of 1 or more. Source: consistent hashing with
    bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).
    """
    bound = math.ceil(load_factor * (float(inflight.sum()) + 1.0) / len(inflight))
    room: Bools = inflight + 1 <= bound
    return room
