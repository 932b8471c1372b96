"""What features of engines were checked against."""

import json

from msgspec import structs

from sim.__main__ import main
from sim.caches.names import cache_named
from sim.cluster.simulated_pod import PodKind
from sim.engine.features import FEATURES, features_named
from sim.engine.profiles import DEFAULT_PROFILE, find_profile
from sim.measurement.evidence import (
    BY_CONTEXT,
    CONNECTOR,
    EVIDENCE,
    EXPERTS,
    SHARED,
    features_used,
)

PROFILE = find_profile(DEFAULT_PROFILE)
ALL = ("whole-prompts", "speculative:acceptance=0:0.7/0.4+9000:0.5/0.2", "ranks:count=2")
TRACE = (
    '{"format": "homing-capture", "version": 1}\n'
    '{"time_s": 0, "prompt_tokens": 65, "output_tokens": 9}\n'
)


def test_each_feature_has_an_entry():
    """One sentence, without a full stop, for a list."""
    assert {*FEATURES, BY_CONTEXT, EXPERTS, CONNECTOR, SHARED, "offload"} == set(EVIDENCE)
    for told in EVIDENCE.values():
        assert "checked" in told
        assert not told.endswith(".")


def test_a_pod_uses_what_it_is_told():
    """All of it, and the usual pod nothing."""
    assert features_used(PodKind.of(PROFILE)) == []
    plain = features_named(["speculative:acceptance=0.7/0.4"])
    assert features_used(PodKind.of(PROFILE, features=plain)) == ["speculative"]
    assert features_used(PodKind.of(PROFILE, cache=cache_named("offload"))) == ["offload"]
    everything = PodKind.of(
        structs.replace(PROFILE, expert_tokens=(1, 1000), expert_s=(0.001, 0.002)),
        features=features_named(ALL),
        cache=cache_named("offload:shared_bytes=1000000000"),
    )
    assert features_used(everything.with_role("decode")) == list(EVIDENCE)


def test_reports_say_what_was_used_and_what_it_was_checked_against(tmp_path):
    """All of them, and nothing where nothing is used."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    flags = [part for text in ALL for part in ("--engine", text)]
    both = ["--config", "random", "--config", "round-robin", "--seeds", "1"]
    for name, command in (("replay", ["replay"]), ("compare", ["compare"])):
        rest = both if name == "compare" else []
        for used, given in ((True, flags), (False, [])):
            out = tmp_path / f"{name}-{used}"
            assert main([*command, str(trace), *rest, *given, "--out", str(out)]) == 0
            conditions = json.loads((out / "summary.json").read_bytes())["conditions"]
            assert ("engine_evidence" in conditions) == used
            for file in ("report.md", "report.html"):
                text = (out / file).read_text()
                assert ("evidence for engine features" in text) == used
                assert ("no recording is available" in text) == used
            if used:
                assert conditions["engines"] == {", ".join(ALL): 8}
                assert [told.partition(":")[0] for told in conditions["engine_evidence"]] == [
                    "whole-prompts",
                    "speculative",
                    "speculative-by-context",
                    "ranks",
                ]
