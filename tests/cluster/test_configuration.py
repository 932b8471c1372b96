"""A ConfigMap that is edited in place: in force within seconds, or refused by its own name."""

import json

import yaml

from tests.cluster.release import BY_LABEL, NAME, namespace

CONFIG_MAP = f"{NAME}-config"
KEY = "config.yaml"


async def test_an_edit_counts_within_seconds_and_a_broken_one_is_named(node, tmp_path, rows):
    with namespace(node, "config") as space:
        space.install(BY_LABEL, tmp_path)
        (picker,) = space.pickers()
        text = space.get("configmap", CONFIG_MAP)["data"][KEY]

        def put(new):
            patch = json.dumps({"data": {KEY: new}})
            space.kubectl("patch", "configmap", CONFIG_MAP, "--type=merge", "-p", patch)

        def told(name):
            return [event for event in space.logs(picker) if event["event"] == name]

        config = yaml.safe_load(text)
        config["schedulingProfiles"][0]["plugins"][0]["weight"] = 2
        put(yaml.safe_dump(config))
        await space.until(
            lambda: told("configuration replaced"), 20, "the new weight to be in force"
        )
        put(text + "\nnonsense: true\n")
        await space.until(
            lambda: told("configuration rejected, the last valid one stays in force"),
            20,
            "the refusal",
        )
        (refusal,) = told("configuration rejected, the last valid one stays in force")
        print(refusal, told("configuration replaced"))
        page = space.metrics(picker)
        assert page["homing_config_last_reload_successful"] == 0
        assert f"ConfigMap {space.name}/{CONFIG_MAP}" in json.dumps(refusal)
        assert "/config/config.yaml" not in json.dumps(refusal)
        put(text)
        await space.until(lambda: len(told("configuration replaced")) == 2, 20, "the old one again")
