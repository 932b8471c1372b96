"""The table of GPUs."""

import pytest

from sim.engine.profiles import ProfileError
from sim.estimation.gpus import gpu_named, gpus


def test_the_table_has_the_usual_gpus_with_their_sources():
    """Each with memory, bandwidth, arithmetic and interconnect, and where they are from."""
    asked = "t4 l4 a10g l40s a100-40gb a100-80gb h100 h200 b200 mi300x rtx-4090 rtx-pro-6000"
    assert set(asked.split()) <= set(gpus())
    for gpu in gpus().values():
        assert 10e9 < gpu.memory_bytes < 400e9
        assert 50 < gpu.half_flops / gpu.memory_bytes_per_s < 600
        assert gpu.fp8_flops is None or gpu.fp8_flops / gpu.half_flops == pytest.approx(2, rel=0.02)
        assert len(gpu.source) > 20


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("t4", (256, 2048)), ("a100-80gb", (256, 2048)), ("h100", (1024, 8192)),
        ("h200", (1024, 8192)), ("b200", (1024, 16_384)),
    ],
)  # fmt: skip
def test_limits_of_a_step_are_those_of_vllm(name, limits):
    """By memory, but an A100 is not among the large ones."""
    assert gpus()[name].engine_defaults == limits


def test_names_are_forgiving_and_unknown_ones_are_told():
    """Case and separators do not matter."""
    assert gpu_named("RTX 4090") is gpus()["rtx-4090"]
    with pytest.raises(
        ProfileError, match=r"no GPU 'h10', did you mean `h100`.*expected one of t4, "
    ):
        gpu_named("h10")
