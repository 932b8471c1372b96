"""Weights change while the picker serves, by the mounted file and by the API server."""

import pytest
import yaml

from tests.apiserver.cluster import POOL, Release, messages, running_engines, running_picker
from tests.chart.rendering import ROOT
from tests.envoy.rig import until

VALUES = ROOT / "tests/chart/values"
SCORER = "added-time-scorer"


def reweighed(text, weight):
    """`text` with another weight of its scorer."""
    config = yaml.safe_load(text)
    for plugin in config["schedulingProfiles"][0]["plugins"]:
        if plugin["pluginRef"] == SCORER:
            plugin["weight"] = weight
    return yaml.safe_dump(config)


async def weight(picker):
    return await picker.metric("scorer_weight", profile="default", scorer=SCORER)


async def events(namespace, reason, count):
    """Messages of Events about the pool, once there are `count` of them."""

    def found():
        told = messages(namespace.list("events"), reason)
        return told if len(told) == count else None

    return await until(found, f"{count} Events {reason}")


@pytest.fixture
async def engine(namespace):
    async with running_engines("a") as (engine,):
        namespace.create_pool(engine.port)
        namespace.run_pod(engine)
        yield engine


async def test_a_changed_config_map_is_in_force_at_once(helm, namespace, engine, tmp_path):
    """Without waiting for the kubelet; the pool has an Event of it, as of a bad one."""
    release = Release(helm, namespace, VALUES / "existing-pool.yaml", tmp_path)
    name, before = release.config_map(), release.config_text()
    async with running_picker(release, tmp_path / "picker") as picker:
        await picker.knows(engine)
        assert await weight(picker) == 1

        namespace.patch("configmaps", name, data={"config.yaml": reweighed(before, 7)})
        await until(lambda: _equal(weight(picker), 7), "the new weight")
        (told,) = await events(namespace, "ConfigApplied", 1)
        assert told == f"generation 2: scorer {SCORER}: weight 1 -> 7"
        (event,) = namespace.list("events")
        pool = namespace.get("inferencepools", POOL)
        assert event["involvedObject"]["uid"] == pool["metadata"]["uid"]
        assert event["type"] == "Normal"

        # The kubelet comes late with the same, and after that with nothing new.
        picker.mounted.write(reweighed(before, 7))
        namespace.patch("configmaps", name, data={"config.yaml": "kind: Nonsense\n"})
        await events(namespace, "ConfigRejected", 1)
        assert await picker.metric("config_last_reload_successful") == 0
        assert await weight(picker) == 7
        assert await picker.pick() == engine.address
    assert release.refused() == set()


async def test_without_the_watch_the_mounted_file_counts(helm, namespace, engine, tmp_path):
    """The Role allows no look at ConfigMaps and the picker asks for none."""
    release = Release(helm, namespace, VALUES / "no-config-map-watch.yaml", tmp_path)
    name, before = release.config_map(), release.config_text()
    async with running_picker(release, tmp_path / "picker") as picker:
        await picker.knows(engine)
        namespace.patch("configmaps", name, data={"config.yaml": reweighed(before, 9)})
        picker.mounted.write(reweighed(before, 5))
        await until(lambda: _equal(weight(picker), 5), "the weight of the file")
        (told,) = await events(namespace, "ConfigApplied", 1)
        assert told == f"generation 2: scorer {SCORER}: weight 1 -> 5"
        assert await picker.pick() == engine.address
    assert release.refused() == set()


async def _equal(found, expected):
    return await found == expected
