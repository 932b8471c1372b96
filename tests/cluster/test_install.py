"""Installed as the documentation says, and asked through its own gateway."""

import asyncio

from tests.cluster.release import load, namespace


async def test_the_quick_start_serves(node, tmp_path):
    """Standalone, simulated pods, no gateway and no CRD: the first minutes of a user."""
    with namespace(node, "quick-start") as space:
        space.run_models(3)
        space.install(
            {
                "pool": {"matchLabels": {"app": "model-server"}, "targetPorts": [{"number": 8000}]},
                "standalone": {
                    "enabled": True,
                    "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
                },
            },
            tmp_path,
        )
        async with load(space.address("homing-envoy", 8081)) as asked:
            await asyncio.sleep(5)
        assert set(asked.requests) == {"200"}, asked.told
        assert asked.requests["200"] > 50
