"""Means to run experiments besides this machine's processes: a scheduler of Dask."""

import os
import sys
from pathlib import Path

import pytest
from distributed import LocalCluster

ROOT = Path(__file__).parents[3]


@pytest.fixture
def scheduler():
    """Yield the address of a Dask scheduler with two worker processes, without its scheme."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ":".join([str(ROOT), *sys.path])
    try:
        with LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None,
            host="127.0.0.1",
        ) as cluster:  # fmt: skip
            yield cluster.scheduler_address.removeprefix("tcp://")
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
