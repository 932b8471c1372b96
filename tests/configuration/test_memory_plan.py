import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.memory_plan import (
    INDEX_BYTES_MIN,
    PROCESS_BYTES,
    fitted,
    memory_plan,
)
from epp.core.knowledge.affinity import SessionIndexSettings
from epp.core.knowledge.prefix import PrefixIndexSettings
from epp.flags.command_lines import parse_serve

MIB = 2**20


def flags(*given):
    return parse_serve(["--endpoints-file=e", *given], {})


@pytest.mark.parametrize(
    ("limit", "bodies", "indexes"),
    [(256, 64, 32), (512, 128, 128), (1_024, 256, 320), (2_048, 512, 704)],
)
def test_bodies_and_indexes_share_what_the_process_leaves(limit, bodies, indexes):
    """In MiB, with the defaults: a container of 1 GiB leaves the index its usual 256 MiB."""
    bodies_bytes = flags().held_body_bytes_max(limit * MIB)
    plan = memory_plan(limit * MIB, bodies_bytes)
    assert (plan.bodies_bytes, plan.indexes_bytes) == (bodies * MIB, indexes * MIB)


@given(st.integers(64 * MIB, 2**40), st.integers(0, 2**40))
def test_the_plan_stays_below_the_limit_wherever_that_can_be(limit_bytes, bodies_bytes):
    """Below it is what the process and the bodies leave; the indexes always have a little."""
    plan = memory_plan(limit_bytes, bodies_bytes)
    assert plan.indexes_bytes >= INDEX_BYTES_MIN
    if limit_bytes >= PROCESS_BYTES + bodies_bytes + 2 * INDEX_BYTES_MIN:
        assert PROCESS_BYTES + bodies_bytes + 2 * plan.indexes_bytes <= limit_bytes


def test_prefix_indexes_share_evenly_and_keep_less_if_that_is_configured():
    """Indexes of another kind are small and stay as they are."""
    plan = memory_plan(512 * MIB, 128 * MIB)
    small, large = PrefixIndexSettings(memory_max_bytes=MIB), PrefixIndexSettings()
    sessions = SessionIndexSettings()
    told = fitted({"small": small, "large": large, "sessions": sessions}, plan)
    assert list(told) == ["small", "large", "sessions"]
    assert told["small"] is small
    assert told["sessions"] is sessions
    assert told["large"].memory_max_bytes == 64 * MIB
    assert fitted({"sessions": sessions}, plan) == {"sessions": sessions}
