import pickle
import tracemalloc

import numpy as np

from sim.measurement.measures import COLUMNS, Series, busiest_from_s

REQUESTS = 100_000


def made(count: int = REQUESTS) -> Series:
    return Series({name: np.arange(count, dtype=np.float64) for name in COLUMNS})


def test_leaving_requests_out_copies_no_column() -> None:
    series = made()
    tracemalloc.start()
    try:
        part = series.since(1_000.0)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(part) == REQUESTS - 1_000
    assert peak_bytes < 2 * REQUESTS  # a bool a request, where a column takes eight


def test_every_column_leaves_the_same_requests_out() -> None:
    part = made(10).since(4.0)
    for name in COLUMNS:
        assert getattr(part, name).tolist() == [4, 5, 6, 7, 8, 9], name


def test_later_is_later_still() -> None:
    assert made(10).since(4.0).since(2.0).ttft_s.tolist() == [4, 5, 6, 7, 8, 9]
    assert made(10).since(4.0).since(8.0).ttft_s.tolist() == [8, 9]


def test_another_process_gets_only_what_is_asked_for() -> None:
    part = made().since(REQUESTS - 5.0)
    sent = pickle.dumps(part)
    assert len(sent) < 5_000
    assert pickle.loads(sent).e2e_s.tolist() == part.e2e_s.tolist()


def test_the_busiest_stretch_is_found() -> None:
    times_s = np.array([5.0, 0.0, 1.0, 9.0, 9.5])
    work = np.array([10.0, 3.0, 3.0, 4.0, 4.0])
    assert busiest_from_s(times_s, work, 2.0) == 5.0
    assert busiest_from_s(times_s, work, 4.6) == 5.0, "10 + 4 + 4"
    assert busiest_from_s(times_s, np.ones(5), 2.0) == 0.0, "the first of several equals"
    assert busiest_from_s(times_s, np.ones(5), 0.9) == 9.0
    assert busiest_from_s(np.array([]), np.array([]), 2.0) == 0.0


def test_a_part_ends_before_its_end() -> None:
    assert made(10).since(4.0, 7.0).ttft_s.tolist() == [4, 5, 6]
