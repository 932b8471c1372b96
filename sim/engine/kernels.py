"""Conversion of kernel timings of one GPU and model to a profile, without any run of an engine.

The timings are CSV files in the format of casys-kaist/LLMServingSim, in microseconds:
`kernels_dense.csv` (layer, tokens, time_us), `kernels_per_sequence.csv` (layer, sequences, time_us)
and `kernels_attention.csv` (prefill_chunk, kv_prefill, n_decode, kv_decode, time_us). A row of
`kernels_attention.csv` is one prefill chunk after a context, computed together with decoding
requests that all have the same context length.
"""

import csv
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from epp.core.types import Seconds
from sim.engine.profiles import Profile

_US: Final = 1e-6
_TWICE_A_LAYER: Final = frozenset({"layernorm"})
"""Names of layers whose kernel runs twice in each transformer layer: before attention and before
the MLP.
"""
_ONCE: Final = frozenset({"embedding", "final_layernorm"})
_MUCH_READ_TOKENS: Final = 4096
"""Number of context tokens in a decode kernel from which its time depends on reading the context,
and not on launching the kernel.
"""

_Floats = npt.NDArray[np.float64]


class Card(Struct, frozen=True, kw_only=True):
    """Properties of a GPU and model that kernel timings do not contain."""

    name: str
    model: str
    layers: int
    kv_tokens: int
    max_model_len_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    all_reduce_s: Seconds = 0.0
    all_reduce_s_per_token: Seconds = 0.0
    host_s: Seconds = 0.0015


class Attention(Struct, frozen=True, kw_only=True):
    """Constants of the attention time of one transformer layer, in seconds, and the factor on
    decoding beside a prompt chunk.
    """

    decode_s: Seconds
    decode_s_per_context_token: Seconds
    prefill_s: Seconds
    pair_s: Seconds
    mixed_decode_factor: float


def profile_of_kernels(folder: Path, card: Card) -> Profile:
    """Return the profile of a GPU and model from the kernel timings in `folder`. Raises `OSError`
    or `ValueError` if they are unreadable.
    """
    tokens, linear_s = _linear_table(folder / "kernels_dense.csv", card.layers)
    head = _rows(folder / "kernels_per_sequence.csv", ("layer",))
    sequences, head_us = _sum_by(head, "sequences", {})
    slope, base = np.polyfit(sequences, head_us, 1)
    attention = fit_attention(folder / "kernels_attention.csv")
    return Profile(
        name=card.name,
        model=card.model,
        kv_tokens=card.kv_tokens,
        max_model_len_tokens=card.max_model_len_tokens,
        max_num_seqs=card.max_num_seqs,
        max_num_batched_tokens=card.max_num_batched_tokens,
        linear_tokens=tuple(int(count) for count in tokens),
        linear_s=tuple(float(seconds) for seconds in linear_s),
        linear_s_per_token=float(linear_s[-1] / tokens[-1]),
        decode_s=attention.decode_s * card.layers,
        decode_s_per_context_token=attention.decode_s_per_context_token * card.layers,
        prefill_s=attention.prefill_s * card.layers,
        pair_s=attention.pair_s * card.layers,
        mixed_decode_factor=attention.mixed_decode_factor,
        head_s=float(base) * _US,
        head_s_per_sequence=float(slope) * _US,
        all_reduce_s=card.all_reduce_s,
        all_reduce_s_per_token=card.all_reduce_s_per_token,
        host_s=card.host_s,
        shared_context_factor=1.0,
    )


def fit_attention(file: Path) -> Attention:
    """Return the attention constants of one layer that fit the timings in `file`, by least squares
    of relative errors. Each part is fitted on rows that show it alone.

    Decode uses rows without a prefill chunk, and prefill uses rows without decoding requests. The
    factor on decoding beside a chunk is at least 1. It is fitted to the remaining time of mixed
    rows with much decode context and a chunk without context, because a batch of unequal queries is
    skewed. No row has unequal contexts among its decoding requests, so `Profile.skew` stays 0.
    """
    rows = _rows(file, ())
    chunk, before, count, context, time = (
        np.array([float(row[name]) for row in rows])
        for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    )
    read = count * context
    pairs = chunk * before + chunk * chunk / 2
    only = (chunk == 0) & (count > 0)
    decode_us, per_token_us = _line(read[only], time[only])
    only = (chunk > 0) & (count == 0)
    prefill_us, pair_us = _line(pairs[only], time[only])
    mixed = (chunk > 0) & (before == 0) & (read >= _MUCH_READ_TOKENS)
    left = time[mixed] - prefill_us - pair_us * pairs[mixed] - decode_us
    factor = _through_origin(per_token_us * read[mixed], left, time[mixed])
    return Attention(
        decode_s=decode_us * _US,
        decode_s_per_context_token=per_token_us * _US,
        prefill_s=prefill_us * _US,
        pair_s=pair_us * _US,
        mixed_decode_factor=max(1.0, factor),
    )


def _linear_table(file: Path, layers: int) -> tuple[_Floats, _Floats]:
    """Return (numbers of tokens, seconds): the kernel time, for each number of tokens in a step, of
    all layers except attention, head and sampler.
    """
    rows = _rows(file, ("layer",))
    weights = {
        row["layer"]: 1.0
        if row["layer"] in _ONCE
        else layers * (1 + (row["layer"] in _TWICE_A_LAYER))
        for row in rows
    }
    tokens, time_us = _sum_by(rows, "tokens", weights)
    return tokens, time_us * _US


def _rows(file: Path, text: tuple[str, ...]) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    if not rows:
        raise ValueError(f"{file}: expected at least one row.")
    for number, row in enumerate(rows, start=2):
        for name, value in row.items():
            try:
                float("0" if name in text else value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{file}:{number}: {name}: expected a number, got {value!r}."
                ) from None
    return rows


def _sum_by(
    rows: list[dict[str, str]], name: str, weights: dict[str, float]
) -> tuple[_Floats, _Floats]:
    """Return the distinct values of the column `name` in ascending order, and for each the sum of
    the times (in µs), weighted by layer.
    """
    sums: dict[float, float] = {}
    for row in rows:
        at = float(row[name])
        sums[at] = sums.get(at, 0.0) + float(row["time_us"]) * weights.get(row["layer"], 1.0)
    ordered = sorted(sums)
    return np.array(ordered), np.array([sums[at] for at in ordered])


def _line(x: _Floats, y: _Floats) -> tuple[float, float]:
    """Return base and slope of the line through (x, y) that minimises the squares of the relative
    errors. Relative errors are used because times differ widely.
    """
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    return float(base), float(slope)


def _through_origin(x: _Floats, y: _Floats, scale: _Floats) -> float:
    """Return the factor f that minimises the squares of `(f * x - y) / scale`."""
    return float((x / scale) @ (y / scale) / ((x / scale) @ (x / scale)))
