"""Jobs on executors of others: theirs are the same answers, and their failures have names."""

import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from sim.experiments import executors
from sim.experiments.executors import ExecutorError, Submitted, workers_at
from sim.experiments.jobs import JobError


def doubled(number):
    if number < 0:
        raise JobError(f"{number} is negative")
    return number * 2


def halved(number):
    return 8 / number


def test_every_job_is_answered_under_its_number():
    """Whatever the order in which they end."""
    with ThreadPoolExecutor(4) as pool, Submitted(pool) as workers:
        assert dict(workers.outcomes(doubled, range(50))) == {n: n * 2 for n in range(50)}


def test_a_job_that_fails_is_told_and_the_others_go_on():
    """By its own sentence if it has one, else by what was raised."""
    with ThreadPoolExecutor(2) as pool, Submitted(pool) as workers:
        found = dict(workers.outcomes(doubled, [1, -2, 3]))
        assert (found[0], str(found[1]), found[2]) == (2, "-2 is negative", 6)
        found = dict(workers.outcomes(halved, [1, 0, 2]))
        assert (found[0], str(found[1]), found[2]) == (8, "ZeroDivisionError: division by zero", 4)
        assert isinstance(found[1], JobError)


class Slow:
    """Accepts everything, and ends it when it is told to."""

    def __init__(self):
        self.given = []

    def submit(self, task, *given):
        future = Future()
        self.given.append((future, task, given))
        return future

    def end(self):
        future, task, given = self.given.pop(0)
        future.set_result(task(*given))


def test_a_cluster_is_given_no_more_than_it_can_hold(monkeypatch):
    """The next one when one has ended."""
    monkeypatch.setattr(executors, "IN_FLIGHT_MAX", 3)
    slow = Slow()
    outcomes = Submitted(slow).outcomes(doubled, range(10))
    ended = []
    # It submits before it waits.
    thread = threading.Thread(target=lambda: ended.append(next(outcomes)))
    thread.start()
    while len(slow.given) < 3:
        thread.join(0.001)
    assert len(slow.given) == 3
    slow.end()
    thread.join()
    assert ended == [(0, 0)]
    assert len(slow.given) == 3


def test_stopping_cancels_what_has_not_begun():
    """And ends the iteration without an answer."""
    slow = Slow()
    workers = Submitted(slow)
    found = []
    thread = threading.Thread(target=lambda: found.extend(workers.outcomes(doubled, [1, 2])))
    thread.start()
    while len(slow.given) < 2:
        thread.join(0.001)
    workers.stop()
    thread.join()
    assert found == []
    assert all(future.cancelled() for future, _, _ in slow.given)


def test_what_the_cluster_gives_up_has_failed():
    """As Dask cancels all of a scheduler that is gone: it is told, and not waited for."""
    slow = Slow()
    found = {}
    workers = Submitted(slow)
    thread = threading.Thread(target=lambda: found.update(workers.outcomes(doubled, [1, 2])))
    thread.start()
    while len(slow.given) < 2:
        thread.join(0.001)
    slow.given.pop(0)[0].cancel()
    slow.end()
    thread.join()
    assert (str(found[0]), found[1]) == ("the cluster cancelled the job", 4)


@pytest.mark.parametrize("named", ["dask", "dask://", "spark://host:1", "nowhere"])
def test_an_executor_that_there_is_not_is_refused(named):
    """With those that there are."""
    with (
        pytest.raises(ExecutorError, match="expected local, dask://HOST:PORT or ray://"),
        workers_at(named, 1),
    ):
        pass


@pytest.mark.parametrize(("extra", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_an_extra_that_is_not_installed_is_named(extra, package, monkeypatch):
    """With what installs it."""
    monkeypatch.setitem(sys.modules, package, None)
    with (
        pytest.raises(ExecutorError, match=rf"needs pip install 'homing-epp\[sim,{extra}\]'"),
        workers_at(f"{extra}://127.0.0.1:1", 1),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "told"),
    [("127.0.0.1:9", "Connection refused"), ("127.0.0.1", "expected HOST:PORT"), ("a:b", "HOST")],
)
@pytest.mark.parametrize("cluster", ["dask", "ray"])
def test_a_cluster_that_is_not_there_is_told(cluster, address, told, monkeypatch):
    """At once, by its address, in a line; the clients would go on trying."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    with pytest.raises(ExecutorError) as refused, workers_at(f"{cluster}://{address}", 1):
        pass
    sentence = str(refused.value)
    assert sentence.startswith(f"--executor {cluster}://{address}: ")
    assert told in sentence
    assert "\n" not in sentence


class RayTaskError(Exception):
    """What Ray tells of a task that has failed, and what that raised."""

    def __init__(self, cause):
        super().__init__('\x1b[36mray::task()\x1b[39m (pid=1)\n  File "a.py", line 1\nError')
        self.cause = cause


@pytest.fixture
def ray(monkeypatch):
    """A stand-in with the names that Ray documents; what it was asked, in order."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        class Reference:
            def __init__(self, task, given):
                self.future_of_it = Future()
                try:
                    self.future_of_it.set_result(task(*given))
                except Exception as problem:  # noqa: BLE001  as any worker does
                    self.future_of_it.set_exception(RayTaskError(problem))

            def future(self):
                return self.future_of_it

        class Connection:
            def __enter__(self):
                asked.append("connected")

            def __exit__(self, *_):
                asked.append("left")

        def remote(**_):
            def of(task):
                asked.append(task.__name__)
                return SimpleNamespace(remote=lambda *given: Reference(task, given))

            return of

        def init(address, **_):
            asked.append(address)
            return Connection()

        module = SimpleNamespace(
            init=init, remote=remote, exceptions=SimpleNamespace(RayTaskError=RayTaskError)
        )
        monkeypatch.setitem(sys.modules, "ray", module)
        yield SimpleNamespace(
            module=module, asked=asked, address=f"127.0.0.1:{listening.getsockname()[1]}"
        )


def test_ray_is_asked_by_its_interface(ray):
    """Of init, remote and ObjectRef.future; a task is sent once."""
    with workers_at(f"ray://{ray.address}", 1) as workers:
        assert dict(workers.outcomes(doubled, [1, 2, 3])) == {0: 2, 1: 4, 2: 6}
    assert ray.asked == [f"ray://{ray.address}", "connected", "doubled", "left"]


def test_of_a_task_that_failed_on_ray_its_own_sentence_is_told(ray):
    """Not the traceback in colours that Ray wraps it in."""
    with workers_at(f"ray://{ray.address}", 1) as workers:
        found = dict(workers.outcomes(doubled, [1, -2]))
        assert (found[0], str(found[1])) == (2, "-2 is negative")
        found = dict(workers.outcomes(halved, [0]))
        assert str(found[0]) == "ZeroDivisionError: division by zero"


def test_a_ray_server_that_does_not_start_is_told_in_a_line(ray, monkeypatch):
    """It sends a traceback; what that ends with is what happened."""

    def init(*_, **__):
        raise ConnectionAbortedError(
            "Initialization failure from server:\nTraceback (most recent call last):\n"
            '  File "proxier.py", line 772, in Datapath\nRuntimeError: no server for you\n\n'
        )

    monkeypatch.setattr(ray.module, "init", init)
    expected = f"^--executor ray://{ray.address}: RuntimeError: no server for you$"
    with pytest.raises(ExecutorError, match=expected), workers_at(f"ray://{ray.address}", 1):
        pass


def test_serving_and_replaying_import_no_cluster():
    """Neither is installed by `homing-epp[sim]`."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['distributed', 'dask', 'ray']));"
        "import sim.commands; sys.exit(sim.commands.run(['leaderboard', '--list']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "strategies:" in done.stdout
