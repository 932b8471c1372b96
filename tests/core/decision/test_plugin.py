"""What a plugin declares is checked before it is asked for anything."""

from typing import ClassVar

import msgspec
import pytest

from epp.core.abilities import Abilities
from epp.core.decision.plugin import (
    KEPT_READS,
    READABLE,
    declaration_fault,
    may_read_prefix,
    may_read_tokens,
)
from epp.core.knowledge.candidates import Candidates
from epp.core.parameters import Parameters


class Plain(Parameters, frozen=True):
    """Declares nothing."""

    type_name: ClassVar[str] = "plain"


def kind(**members):
    return type("Odd", (Plain,), members, frozen=True)


def able(**abilities):
    return {"abilities": Abilities(**abilities)}


def test_whoever_declares_nothing_may_read_anything():
    """Plugins of before there were abilities go on as they were."""
    assert declaration_fault(Plain) is None
    assert Plain.abilities == Abilities()
    assert may_read_prefix(Plain.abilities)


def test_a_struct_of_its_own_has_to_declare():
    """It has no defaults to inherit."""
    own = msgspec.defstruct("Own", [], frozen=True)
    assert declaration_fault(own).startswith("declares no abilities; it needs")


def test_an_index_has_to_declare_whatever_it_is_made_of():
    """Even that it does nothing besides."""
    assert declaration_fault(kind(open=len)).startswith("declares no abilities; it needs")
    assert declaration_fault(kind(open=len, abilities=Abilities())) is None


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (able(reads=["labels"]), "reads ['labels'], expected a tuple of names among waiting_"),
        (able(reads=("queue",)), "reads ('queue',), expected a tuple of names among waiting_"),
        (able(reads_index=True), "declares reads_index but has no producer_type, producer"),
        (able(marks_responses=True), "declares marks_responses but has no response_headers"),
        (able(picks_several=True), "declares picks_several but has no max_num_of_endpoints"),
        (able(limits_memory=True), "declares limits_memory but has no memory_max_bytes"),
        (
            {"session_of": len},
            "has session_of but does not declare goes_by_sessions=True in its abilities",
        ),
        (
            {"response_headers": len},
            "has response_headers but does not declare marks_responses=True in its",
        ),
        ({"holds": len}, "has holds but does not declare holds_requests=True in its abilities"),
        ({"reads": ()}, "has a class variable reads, which belongs in its abilities"),
        ({"sheds_load": False}, "has a class variable sheds_load, which belongs in its abilities"),
    ],
)
def test_a_declaration_that_does_not_fit_is_told(members, said):
    """In both directions: what is declared and not there, and what is there and not declared."""
    assert declaration_fault(kind(**members)).startswith(said)


def test_every_column_can_be_declared():
    """And every field of the request."""
    columns = {name for name, one in vars(Candidates).items() if isinstance(one, property)}
    assert {*columns, *KEPT_READS, "headers", "prompt_tokens", "cold"} <= set(READABLE)
    assert declaration_fault(kind(**able(reads=READABLE))) is None


@pytest.mark.parametrize(
    ("abilities", "may"),
    [
        ({"reads": ()}, False),
        ({"reads": ("labels", "uncached_tokens")}, True),
        ({"reads": ("cold",), "reads_index": True}, True),
        ({"reads_index": True}, False),
        ({"sheds_load": True}, True),
    ],
)
def test_who_may_read_the_prefix_index(abilities, may):
    """By what is declared alone."""
    assert may_read_prefix(Abilities(**abilities)) is may


@pytest.mark.parametrize(
    ("abilities", "may"),
    [
        ({"reads": ("prompts", "matched_blocks")}, False),
        ({"reads": ("token_media",)}, True),
        ({"reads_index": True}, False),
        ({}, True),
    ],
)
def test_who_may_read_tokens(abilities, may):
    """Whoever does not say what it reads may read them, too."""
    assert may_read_tokens(Abilities(**abilities)) is may
