import pytest

from epp.flags.reading import help_text
from epp.flags.row import CHART_SETS, Row, flags_of
from epp.flags.serve import ServeFlags
from epp.flags.subcommands import (
    ChangesFlags,
    CheckFlags,
    DecisionsFlags,
    EnvoyFlags,
    ExplainFlags,
    TopFlags,
)

NO_FLAGS = {"warnings", "own_namespace", "instance", "own_address", "file", "request_id"}
"""Fields that no flag sets."""
KINDS = (ServeFlags, EnvoyFlags, CheckFlags, ExplainFlags, DecisionsFlags, ChangesFlags, TopFlags)


@pytest.mark.parametrize("kind", KINDS)
def test_help_names_every_flag_once(kind):
    """A flag that is added without a row fails here, and a heading that comes twice."""
    fields = {name for name in kind.__struct_fields__ if name not in NO_FLAGS}
    assert {flag.field for flag in flags_of(kind).values()} == fields
    lines = help_text("usage", kind).splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(headings) == len(set(headings))
    assert sorted(line for line in lines if line.startswith("  --")) == sorted(
        f"  --{name}" for name in flags_of(kind)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_names_flags_that_there_are(kind):
    """And a bound is kept by the default."""
    rows = flags_of(kind)
    for flag in rows.values():
        assert not flag.row.needs or flag.row.needs in rows
        if flag.default is not None:
            assert flag.row.least is None or flag.default >= flag.row.least
            assert flag.row.most is None or flag.default <= flag.row.most
            assert flag.row.above is None or flag.default > flag.row.above


@pytest.mark.parametrize(
    ("chart", "refusal"),
    [("", ""), (CHART_SETS, CHART_SETS), ("pool.name", "use the key pool.name")],
)
def test_the_chart_says_what_to_use_instead(chart, refusal):
    assert Row("Endpoints", "a pool", chart=chart).refusal_of_chart == refusal
