"""The measurement of the rule by time in docs/disaggregation.md."""

import pytest
from msgspec.structs import replace

from docs import stage_rule
from docs.stage_rule import (
    ALWAYS,
    NEVER,
    RULE,
    RULE_LEARNT_LINK,
    RULE_UNKNOWN_LINK,
    Case,
    Run,
    hold_out_cases,
    simulated,
    sweep_cases,
)
from sim.engine.links import link_named
from sim.engine.profiles import find_profile

SHORT = Case(prompt_tokens=4_096, answer_tokens=32, load=0.5, network="tcp-25gbe")


def test_hold_out_cases_have_nothing_in_common_with_the_sweep():
    """No length, load or network of one is in the other, and each of them is used."""
    for name in ("prompt_tokens", "answer_tokens", "load", "network"):
        swept, held = (
            {getattr(case, name) for case in cases} for cases in (sweep_cases(), hold_out_cases())
        )
        assert len(held) > 1
        assert not swept & held
    assert {link_named(case.network).bytes_per_s for case in hold_out_cases()} == {10e9, 5e9}


def test_no_run_is_planned_twice():
    runs = stage_rule.planned_runs()
    assert len({(run.case, run.rule, run.seed, run.prefill_delay) for run in runs}) == len(runs)


@pytest.mark.parametrize(("rule", "remote"), [(NEVER, 0.0), (ALWAYS, 1.0)])
def test_a_rule_decides_where_prompts_are_computed(rule, remote):
    row = simulated(Run(part="sweep", case=SHORT, rule=rule, seed=1))
    assert (row.completed, row.remote) == (stage_rule.SWEEP_REQUESTS, remote)


def test_the_rule_measures_the_network():
    """The default is 32 times too fast for the network: prompts wait for others' KV transfers."""
    slow = replace(SHORT, network="0.625:0.006")
    e2e_s = {
        rule: simulated(Run(part="links", case=slow, rule=rule, seed=1)).late_e2e_s
        for rule in (RULE_LEARNT_LINK, RULE_UNKNOWN_LINK, NEVER)
    }
    assert e2e_s[RULE_LEARNT_LINK] <= stage_rule.WORSE * e2e_s[NEVER]
    assert e2e_s[RULE_UNKNOWN_LINK] > 2.0 * e2e_s[NEVER]


def test_the_rule_with_a_measured_network_is_within_3_percent_after_its_first_requests():
    measured = stage_rule.rows_of(stage_rule.read(), "links")
    for case in stage_rule.link_cases():
        late = stage_rule.LATE_E2E
        to = stage_rule.better(measured, case, late)
        found = stage_rule.ratio(measured, case, RULE_LEARNT_LINK, to, late)
        assert found.value <= stage_rule.WORSE, case


def test_mixed_traffic_has_chats_whose_turns_follow_their_answers():
    arrivals = stage_rule.mixed(
        Case(load=0.4, network="roce200"), find_profile(stage_rule.PROFILE), 1
    )
    later = [one for one in arrivals if one.after is not None]
    assert later
    for one in later:
        before = arrivals[one.after]
        assert (before.session, before.turn) == (one.session, one.turn - 1)


def test_the_rule_is_within_3_percent_of_the_better_of_never_and_always():
    """In every case of the sweep and of the hold-out."""
    measured = stage_rule.read()
    for part, cases in (("sweep", sweep_cases()), ("hold-out", hold_out_cases())):
        rows = stage_rule.rows_of(measured, part)
        for case in cases:
            found = stage_rule.ratio(rows, case, RULE, stage_rule.better(rows, case))
            assert found.value <= stage_rule.WORSE, case
