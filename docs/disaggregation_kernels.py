"""Published kernel times of the model and the GPUs in the disaggregation guide of llm-d.

    python -m docs.disaggregation_kernels --aiconfigurator SYSTEMS

The command writes docs/disaggregation-kernels.json with the times of gpt-oss-120b on 1, 2 and 4
H200s. SYSTEMS is the folder `aic-core/src/aiconfigurator_core/systems/data` of
ai-dynamo/aiconfigurator (Apache-2.0), read as of 2026-08-21. `docs.kernel_times` says how the times
of single kernels are added up.

`kernel_profile` makes a profile of these times. They were measured kernel by kernel, apart from any
latency of the guide, and nothing is fitted to a latency.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec.structs import replace

from docs.kernel_times import KernelTimes, shape_of, times_of, written
from epp.core.types import Seconds
from sim.engine.profiles import Profile
from sim.estimation.estimate import EstimateSettings, estimated_profile
from sim.estimation.gpus import gpu_named
from sim.estimation.roofline import Roofline, fitted
from sim.output import write_whole

MODEL: Final = "gpt-oss-120b"
GPU: Final = "h200"
DEGREES: Final = (1, 2, 4)
"""Numbers of GPUs of one pod in the guide's setups."""
RESULTS: Final = Path(__file__).parent / "disaggregation-kernels.json"


def main() -> int:
    """Write docs/disaggregation-kernels.json from the tables of aiconfigurator."""
    parser = argparse.ArgumentParser(prog="python -m docs.disaggregation_kernels")
    parser.description = "Write docs/disaggregation-kernels.json from published kernel times."
    parser.add_argument(
        "--aiconfigurator", type=Path, required=True, help="folder of aiconfigurator's tables"
    )
    options = parser.parse_args()
    found = [times_of(options.aiconfigurator, GPU, MODEL, degree) for degree in DEGREES]
    write_whole(RESULTS, written(found))
    return 0


def estimated(degree: int, context_tokens: int) -> Profile:
    """Return the profile that `sim profile estimate` gives the model on `degree` GPUs."""
    settings = EstimateSettings(
        gpu=gpu_named(GPU), tensor_parallel=degree, context_tokens=context_tokens
    )
    return estimated_profile(shape_of(MODEL), settings)


def kernel_profile(degree: int, context_tokens: int) -> Profile:
    """Return the profile of the model on `degree` GPUs that has the published kernel times.

    The times of matrix products, experts, all-reduces and attention are published. The output
    layer, the kernels that are not matrix products, the host time and the size of the KV cache are
    those of the estimate.
    """
    times = next(one for one in _read() if one.tensor_parallel == degree)
    base = estimated(degree, context_tokens)
    table = _layer_table(times, context_tokens)
    (before, before_s), (last, last_s) = table[-2:]
    prefill_s, pair_s = _line(
        [tokens * tokens / 2 for tokens, _ in times.prefill], [at for _, at in times.prefill]
    )
    decode_s, context_token_s = _line(
        [requests * context for requests, context, _ in times.decode],
        [at for _, _, at in times.decode],
    )
    return replace(
        base,
        name=f"{MODEL}-{GPU}-tp{degree}-kernels",
        linear_tokens=tuple(tokens for tokens, _ in table),
        linear_s=tuple(seconds for _, seconds in table),
        linear_s_per_token=(last_s - before_s) / (last - before),
        all_reduce_s=0.0,
        all_reduce_s_per_token=0.0,
        prefill_s=prefill_s,
        pair_s=pair_s,
        decode_s=decode_s,
        decode_s_per_context_token=context_token_s,
        estimated=None,
    )


def _read() -> list[KernelTimes]:
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[KernelTimes])


def _layer_table(times: KernelTimes, context_tokens: int) -> list[tuple[int, Seconds]]:
    """Return pairs (tokens of a step, seconds of all layers without attention)."""
    at = Roofline(
        shape=shape_of(MODEL),
        gpu=gpu_named(GPU),
        efficiency=fitted().gpus[GPU],
        tensor_parallel=times.tensor_parallel,
        context_tokens=context_tokens,
    )
    experts, all_reduces = dict(times.experts), dict(times.all_reduces)
    return [
        (
            tokens,
            seconds + experts[tokens] + all_reduces.get(tokens, 0.0) + at.elementwise_s(tokens),
        )
        for tokens, seconds in times.products
    ]


def _line(sizes: Sequence[float], seconds: Sequence[Seconds]) -> tuple[Seconds, Seconds]:
    """Return the constant and the slope of a line through times by size, fitted by least squares
    of relative errors.
    """
    weights = 1.0 / np.array(seconds)
    columns = np.stack([weights, np.array(sizes) * weights], axis=1)
    constant, slope = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    return float(constant), float(slope)


if __name__ == "__main__":
    sys.exit(main())
