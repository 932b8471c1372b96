"""The Markdown tables of docs/estimates.md, made of the results of `python -m docs.estimates`."""

from docs.estimates import Results, published
from sim.estimation.gpus import gpus
from sim.estimation.roofline import KINDS
from sim.reports.report import markdown_table


def error_table(results: Results) -> str:
    """Return the table of the published errors of estimated profiles."""
    rows = [("model", "GPU", "prefill", "decode")]
    for name, says in (("measured", "measured with other models"), ("unmeasured", "not measured")):
        for kind, error in published(results)[name].items():
            rows.append(
                (
                    KINDS[kind],
                    says,
                    f"± {error.prefill:.0%}",
                    f"± {error.decode:.0%}",
                )
            )
    return markdown_table(rows, text_columns=2)


def left_table(results: Results) -> str:
    """Return the table of errors when a measured model is estimated without its own measurement, or
    without all of its GPU.
    """
    rows = [("measured", "without", "prefill", "decode")]
    told = {"model": "this model", "gpu": "this GPU"}
    ordered = sorted(results.left, key=lambda one: (one.kind != "dense", one.kind, one.what))
    rows += [
        (one.what, told[one.without], _per_cent(one.prefill), _per_cent(one.decode))
        for one in ordered
    ]
    return markdown_table(rows, text_columns=2)


def built_in_table(results: Results) -> str:
    """Return the table of errors of estimates of the built-in profiles, over whole engine steps."""
    rows = [("built-in profile", "without", "prefill", "decode")]
    told = {"model": "this model", "gpu": "this GPU"}
    rows += [
        (f"`{one.what}`", told[one.without], _per_cent(one.prefill), _per_cent(one.decode))
        for one in results.built_in
    ]
    return markdown_table(rows, text_columns=2)


def cache_table(results: Results) -> str:
    """Return the table of measured KV-cache sizes and their estimates without measurements on the
    same GPU.
    """
    rows = [("KV cache of each GPU", "measured", "estimated", "error, of the GPU's memory")]
    rows += [
        (one.what, f"{one.measured_gb:.2f} GB", f"{one.estimated_gb:.2f} GB", f"{one.error:+.1%}")
        for one in results.caches
    ]
    return markdown_table(rows, text_columns=1)


def judged_table(results: Results) -> str:
    """Return the table of simulated runs with estimated profiles beside recordings of real runs."""
    rows = [("recording", "what", "recorded", "simulated", "error", "published error")]
    rows += [
        (
            one.truth,
            one.what.replace(", nothing fitted", ""),
            _figure(one.recorded, one.unit),
            _figure(one.simulated, one.unit),
            f"{one.error:+.1%}",
            f"± {one.tolerance:.0%}",
        )
        for one in results.judged
    ]
    return markdown_table(rows, text_columns=2)


def gpu_table(results: Results) -> str:
    """Return the table of known GPUs: their data sheet figures, and whether kernels were measured
    on them.
    """
    rows = [
        ("GPU", "memory", "bandwidth", "16 bits", "FP8", "interconnect", "kernels", "source"),
    ]
    rows += [
        (
            f"`{gpu.name}`",
            f"{gpu.memory_bytes / 1e9:.1f} GB",
            f"{gpu.memory_bytes_per_s / 1e9:,.0f} GB/s",
            f"{gpu.half_flops / 1e12:,.0f} TFLOPS",
            f"{gpu.fp8_flops / 1e12:,.0f} TFLOPS" if gpu.fp8_flops else "",
            f"{gpu.interconnect_bytes_per_s / 1e9:,.0f} GB/s",
            "measured" if gpu.name in results.efficiencies else "",
            gpu.source,
        )
        for gpu in gpus().values()
    ]
    return markdown_table(rows, text_columns=1)


def efficiency_table(results: Results) -> str:
    """Return the table of the shares of a GPU's peak performance that kernels reach."""
    fields = (
        ("linear_bandwidth", "products, reading"), ("linear_compute", "products, arithmetic"),
        ("fp8_compute", "the same in FP8"), ("prefill_compute", "attention, prompts"),
        ("decode_bandwidth", "attention, decoding"), ("expert_bandwidth", "experts, reading"),
        ("expert_compute", "experts, arithmetic"), ("all_reduce_share", "all-reduce"),
    )  # fmt: skip
    rows = [("GPU", *(says for _, says in fields))]
    for name, one in results.efficiencies.items():
        rows.append((f"`{name}`", *(f"{getattr(one, field):.2f}" for field, _ in fields)))
    return markdown_table(rows, text_columns=1)


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:,.0f} {unit}".rstrip() if value >= 1000 else f"{value:.4g} {unit}".rstrip()


def _per_cent(error: float | None) -> str:
    return "" if error is None else f"{error:.0%}"
