"""Replicas find each other by the EndpointSlices of the cluster, and tell each other what they decide."""

import asyncio

from tests.cluster.release import BY_LABEL, ENVOY, NAME, load, name_of, namespace


async def test_replicas_find_each_other_and_those_that_come(node, tmp_path):
    with namespace(node, "peers") as space:
        space.run_models(3)
        space.install({**BY_LABEL, "replicas": 2, "standalone": ENVOY}, tmp_path)

        def each_hears_the_other():
            pages = [space.metrics(picker) for picker in space.ready_pickers()]
            return [page["homing_peers"] for page in pages] == [1.0, 1.0]

        await space.until(each_hears_the_other, 30, "replicas to hear each other")
        async with load(space.address(f"{NAME}-envoy", 8081)) as asked:
            await asyncio.sleep(5)
        assert set(asked.requests) == {"200"}, asked.told
        pages = [space.metrics(picker) for picker in space.pickers()]
        merged = 'homing_peer_records_total{direction="received",outcome="applied"}'
        sent = sum(asked.requests.values())
        decided = sum(
            value
            for page in pages
            for name, value in page.items()
            if name.startswith("homing_request_total")
        )
        assert decided >= sent
        assert sum(page.get(merged, 0.0) for page in pages) > 0, [
            n for n in pages[0] if "peer_records" in n
        ]
        (first, _) = space.pickers()
        space.kubectl("delete", "pod", name_of(first))
        await space.until(
            each_hears_the_other,
            60,
            "the replica that came to be heard",
        )
