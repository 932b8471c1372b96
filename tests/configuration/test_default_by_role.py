"""The built-in default configuration, which depends on the roles of endpoints."""

import pytest

from epp.configuration.build import build_settings, plugin_tables
from epp.configuration.config import DEFAULT_CONFIG, DEFAULT_SOURCE, load_config
from epp.configuration.defaults import (
    BY_ROLE_SOURCE,
    default_for_roles,
    default_with_stages,
    stages_apart,
)
from epp.configuration.explaining import explain
from epp.configuration.live import LiveConfiguration
from epp.core.decision.account import Route
from epp.core.decision.inputs import Reconfigured, ScrapeFailed
from epp.core.decision.stages import ByTime, Multimodal, Order
from epp.core.types import Refusal, Stage
from epp.flags.command_lines import parse_serve
from tests.core.decision.staged import chat, of_role, pool_of, scrape

TABLES = plugin_tables()
PREFILL = frozenset({Stage.PREFILL})
ENCODE = frozenset({Stage.ENCODE})
BOTH = PREFILL | ENCODE
IMAGE = (b"digest-of-an-image",)


def pool(*roles):
    return [of_role(number, role) for number, role in enumerate(roles)]


def stages_of(apart):
    return build_settings(load_config(default_with_stages(apart).text, "c", TABLES)).stages


def live(content=None):
    name = ("--config-file", "c.yaml") if content else ()
    return LiveConfiguration(parse_serve(["--endpoints-file", "e", *name], {}), TABLES, content)


@pytest.mark.parametrize(
    ("roles", "apart"),
    [
        ((), ""),
        ((None, None), ""),
        (("decode", None), ""),
        (("both", "prefill-decode", "encode-prefill-decode"), ""),
        (("other", "encode-decode"), ""),
        (("encode", "decode"), "e"),
        (("encode", "prefill-decode"), "e"),
        (("prefill", "decode"), "p"),
        (("prefill", None), "p"),
        (("prefill",), "p"),
        (("encode-prefill", "decode"), "pe"),
        (("encode", "prefill", "decode"), "pe"),
    ],
)
def test_a_stage_is_apart_if_an_endpoint_works_on_it_and_does_not_decode(roles, apart):
    named = {"p": Stage.PREFILL, "e": Stage.ENCODE}
    assert stages_apart(pool(*roles)) == {named[letter] for letter in apart}


def test_the_default_follows_the_roles_and_returns():
    configuration = live()
    before = configuration.hash
    assert configuration.default_for(pool(None, "decode")) is None
    offer = configuration.default_for(pool("prefill", None))
    assert not offer.settings.stages.alone
    configuration.accept(offer)
    assert configuration.config.source == BY_ROLE_SOURCE
    assert configuration.default_for(pool("prefill", "decode")) is None
    assert configuration.told(2).document == default_with_stages(PREFILL).text
    with_encode = configuration.default_for(pool("prefill", "decode", "encode"))
    configuration.accept(with_encode)
    assert with_encode.settings.stages.encode is not None
    assert configuration.default_for(pool("decode", "encode-prefill")) is None
    back = configuration.default_for(pool("decode"))
    configuration.accept(back)
    assert (configuration.config.source, configuration.hash) == (DEFAULT_SOURCE, before)
    assert configuration.generation == 4


def test_a_given_configuration_stays():
    assert live(DEFAULT_CONFIG.encode()).default_for(pool("prefill", "decode")) is None


@pytest.mark.parametrize("apart", [PREFILL, ENCODE, BOTH])
def test_all_defaults_have_the_same_prefix_index(apart):
    """The index therefore keeps its content when the default changes."""
    whole, staged = (
        build_settings(load_config(text, "c", TABLES))
        for text in (DEFAULT_CONFIG, default_with_stages(apart).text)
    )
    assert staged.indexes[staged.prefix] == whole.indexes[whole.prefix]
    others = staged.indexes.keys() - whole.indexes.keys()
    assert others == ({"mm-embeddings-cache-producer"} if Stage.ENCODE in apart else set())


@pytest.mark.parametrize("apart", [PREFILL, ENCODE, BOTH])
def test_a_default_by_role_has_the_rules_of_its_stages(apart):
    stages = stages_of(apart)
    prefills = Stage.PREFILL in apart
    assert (stages.prefill is not None) == prefills
    assert isinstance(stages.prefill_if, ByTime) == prefills
    assert (stages.order is Order.PREFILL_FIRST) == prefills
    assert (stages.encode is not None) == (Stage.ENCODE in apart)
    assert isinstance(stages.encode_if, Multimodal) == (Stage.ENCODE in apart)
    assert (stages.fallback is not None) == (Stage.ENCODE in apart)


@pytest.mark.parametrize("apart", [PREFILL, ENCODE, BOTH])
def test_a_default_by_role_loads_without_a_warning_and_is_explained(apart):
    default = default_with_stages(apart)
    config = load_config(default.text, default.source, TABLES)
    assert config.warnings == ()
    text = explain(config)
    work = " and ".join(stage for stage in ("prefill", "encode") if Stage(stage) in apart)
    assert f"requests by role, because endpoints {work} without decoding" in text
    assert ("5120 tokens, 20 decode at D: " in text) == (Stage.PREFILL in apart)
    assert ("for prompts with an image, audio or video" in text) == (Stage.ENCODE in apart)


# --- decisions ---


def served_by(roles, *requests):
    """Return the decisions of the default for a pool of these roles."""
    made = pool_of(roles, indexes={})
    config = load_config(default_for_roles(pool(*roles)).text, "c", TABLES)
    made.take(Reconfigured(build_settings(config)), 0.0)
    scrape(made, 0.0)
    return [made.schedule(one, 0.1) for one in requests]


@pytest.mark.parametrize("roles", [("encode", "decode"), ("encode", "prefill", "decode")])
def test_images_are_encoded_elsewhere_and_texts_are_not(roles):
    image, text = served_by(roles, chat(64, media=[IMAGE]), chat(64))
    assert image.account.route is Route.ENCODE_DECODE
    assert [one.name for one in image.encoders] == ["pod-0"]
    assert text.account.route is Route.DECODE_ONLY
    assert text.encoders == ()


def test_an_image_goes_to_the_encode_endpoint_that_has_it():
    asked = [chat(64, media=[(f"image {number % 4}".encode(),)]) for number in range(40)]
    decisions = served_by(("encode", "encode", "decode"), *asked)
    places = {}
    for number, decision in enumerate(decisions):
        places.setdefault(number % 4, set()).add(decision.encoders[0].name)
    assert all(len(found) == 1 for found in places.values())
    assert len(set.union(*places.values())) == 2


def test_without_an_encode_endpoint_that_is_ready_the_decode_endpoint_encodes():
    roles = ("encode", "decode")
    made = pool_of(roles, indexes={})
    config = load_config(default_for_roles(pool(*roles)).text, "c", TABLES)
    made.take(Reconfigured(build_settings(config)), 0.0)
    for at in (0.1, 0.2):
        made.take(ScrapeFailed(slot=0, answered=False), at)
    decision = made.schedule(chat(64, media=[IMAGE]), 0.3)
    assert decision.account.route is Route.AGGREGATED_FALLBACK
    assert decision.endpoint.name == "pod-1"


def test_encode_endpoints_get_no_whole_requests():
    (refusal,) = served_by(("encode",), chat(64))
    assert isinstance(refusal, Refusal)
    assert refusal.stage is Stage.DECODE
