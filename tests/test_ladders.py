"""What docs/ladders.md is measured by."""

import pytest

from docs import ladders
from docs.ladders import (
    ARMS,
    CAPACITY_73,
    GUIDE,
    PRECISE,
    RANDOM,
    RATES,
    Arm,
    Measured,
    Step,
    ladder,
    measure,
    read,
)


def test_all_that_the_page_shows_was_measured():
    measured = read()
    for arm in ARMS:
        assert tuple(step.rate_per_s for step in measured.of(arm)) == RATES


def test_steps_are_those_that_were_published():
    """Their summary is the mean over them: 8,730.0, 6,944.4, 4,266.4 and 4,428.7 tokens a second."""
    assert tuple(ladder()) == RATES
    means = {
        name: sum(step.output_tokens_per_s for step in steps) / len(steps)
        for name, steps in CAPACITY_73.items()
    }
    published = {"precise": 8730.0, "estimated": 6944.4, "load": 4266.4, "random": 4428.7}
    assert means == pytest.approx(published, abs=0.5)


def test_the_warm_up_asks_for_each_prompt_once():
    rate, duration_s = ladders.WARM_UP.rate_per_s, ladders.WARM_UP.duration_s
    content = ladders.WORKLOAD.content
    assert rate * duration_s == content.groups * content.prompts_per_group


def test_of_an_arm_there_is_every_step():
    """Short: who knows what is cached gives out no less than chance, and the first token sooner."""
    told, chance = measure([PRECISE, RANDOM], [15])
    assert [one.arm for one in (told, chance)] == ["precise", "random"]
    assert [step.rate_per_s for step in told.steps] == [15]
    assert told.steps[0].output_tokens_per_s >= chance.steps[0].output_tokens_per_s
    assert told.steps[0].ttft_p90_s < chance.steps[0].ttft_p90_s


def test_blind_pickers_are_told_nothing_by_each_other():
    blind = Arm(name="blind", config=GUIDE.config, told=True, pickers=4, share=False)
    assert blind.cluster().peers is None
    assert Arm(name="sharing", pickers=4).cluster().peers is not None
    assert Arm(name="one").cluster().peers is None


def test_tables_put_what_was_published_beside_what_was_simulated():
    made = Measured(
        arms=[
            ladders.Climbed(
                arm=arm.name,
                config=arm.config,
                steps=[
                    Step(rate_per_s=rate, output_tokens_per_s=4366.5 + at, ttft_p90_s=2.0)
                    for rate in RATES
                ],
            )
            for at, arm in enumerate(ARMS)
        ]
    )
    rows = {row.split("|")[1].strip(): row for row in ladders.mean_table(made).splitlines()}
    assert "| 8,730 | 4,366 | -50% | 0.536 s | 2 s |" in rows["precise"]
    assert "| 14,892 |" in ladders.peak_table(made)
    # All that was made is level, and of what was published the first two are so at two steps.
    agreed = {row.split("|")[1].strip(): row for row in ladders.order_table(made).splitlines()}
    assert agreed["precise, estimated"].split("|")[2].strip() == "1"


def test_what_was_not_measured_is_named():
    with pytest.raises(LookupError, match=r"run `python -m docs.ladders`"):
        Measured(arms=[]).of(GUIDE)
