"""Against servers on loopback; nothing sleeps to wait for anything, events and queues do."""

import asyncio
import contextlib
import re
import ssl
import tracemalloc
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import pairwise

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from epp.configuration.compatibility import MetricsDataSource, MetricsScheme
from epp.core.types import Endpoint, MetricsTarget
from epp.shell.engines.exposition import PageReader
from epp.shell.engines.page_client import PageClient
from epp.shell.engines.scrape import TOGETHER, Scraper, idle_interval_s, interval_s_by_pool
from epp.shell.engines.trust import client_context, trust_of
from tests.shell.engines.certificates import serving_by, written


def page(waiting):
    return b"vllm:num_requests_waiting %d\n" % waiting


def answer(body, *, headers=b"", status=b"200 OK"):
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, headers, len(body), body)


GOOD = answer(page(1))


class Pod:
    """A server whose `reply(number of the request, writer)` says what each request gets."""

    def __init__(self, reply):
        self.reply = reply
        self.requests = 0
        self.connections = 0
        self.heads = []
        self.asked = asyncio.Event()
        self.port = 0

    async def serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                self.requests += 1
                self.asked.set()
                await self.reply(self.requests, writer)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def pod(reply, *, tls=None):
    if isinstance(reply, bytes):
        fixed = reply

        async def reply(number, writer):
            writer.write(fixed)

    served = Pod(reply)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()


def endpoint(port, *, incarnation="", labels=None, name="pod", **target):
    return Endpoint(
        endpoint_id=f"{name}:{port}",
        name=name,
        address=f"127.0.0.1:{port}",
        incarnation=incarnation,
        labels=labels or {},
        metrics=MetricsTarget(port=port, **target),
    )


class Running:
    """A scraper at work, and what it told."""

    def __init__(self, **limits):
        self.observed = asyncio.Queue()
        self.failures = asyncio.Queue()
        settings = {"interval_s": lambda _: 0.005, "backoff_s_max": 0.02, "timeout_s": 5.0} | limits
        self.scraper = Scraper(
            lambda endpoint, metrics: self.observed.put_nowait((endpoint, metrics)),
            lambda endpoint, kind, sentence: self.failures.put_nowait((endpoint, kind, sentence)),
            reader=PageReader(),
            seed=1,
            **settings,
        )


@contextlib.asynccontextmanager
async def scraping(*endpoints, **limits):
    running = Running(**limits)
    running.scraper.replace(endpoints)
    task = asyncio.create_task(running.scraper.run())
    try:
        yield running
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_page_is_observed_again_and_again_over_one_connection():
    """Keep-alive: one connection, many scrapes, and a plain request."""
    async with pod(GOOD) as served, scraping(endpoint(served.port, path="/m x")) as running:
        for _ in range(5):
            seen, metrics = await running.observed.get()
            assert metrics.waiting_requests == 1.0
        assert seen.name == "pod"
        assert served.connections == 1
    head = served.heads[0]
    assert head.startswith(b"GET /m%%20x HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n" % served.port)
    assert running.failures.empty()


async def test_an_endpoint_without_metrics_is_not_scraped():
    """It is ready by time alone; nobody asks it."""
    silent = Endpoint(endpoint_id="s:1", name="s", address="127.0.0.1:1", metrics=None)
    async with pod(GOOD) as served, scraping(silent, endpoint(served.port)) as running:
        for _ in range(3):
            assert (await running.observed.get())[0].name == "pod"
    assert running.failures.empty()


def split(*parts, close=False):
    async def reply(number, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return reply


@pytest.mark.parametrize(
    "reply",
    [
        split(b"HTTP/1.0 200 OK\r\n\r\n", page(1), close=True),
        split(GOOD, close=True),
        split(GOOD[:10], GOOD[10:50], GOOD[50:]),
        split(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"%x\r\n%s\r\n" % (len(page(1)), page(1)),
            b"0\r\n\r\n",
        ),
    ],
    ids=["to-the-end", "closing", "in-pieces", "chunked"],
)
async def test_every_way_to_serve_a_page_works(reply):
    """Also servers that close after each page: that is no failure."""
    async with pod(reply) as served, scraping(endpoint(served.port)) as running:
        for _ in range(4):
            assert (await running.observed.get())[1].waiting_requests == 1.0
        assert running.failures.empty()


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (b"SSH-2.0-x\r\n", "page", "did not answer with HTTP/1"),
        (answer(b"<html>hello</html>"), "page", "sent an invalid page: .* has no load gauge"),
        (answer(b"", status=b"500 Oops"), "status", "answered 500, expected 200"),
        (answer(b"", status=b"302 Found", headers=b"Location: /x\r\n"), "status", "answered 302"),
        (answer(b"x" * 5000), "page", "is larger than 1000 bytes"),
        (split(GOOD[:-3], close=True), "page", "before the page ended"),
        (split(close=True), "refused", "closed without an answer"),
    ],
    ids=["garbage", "no-metrics", "error", "redirect", "huge", "half-closed", "silent-close"],
)
async def test_a_failed_scrape_is_told_by_kind_and_observes_nothing(reply, kind, words):
    """The sentence begins with the URL; values that were known are not touched."""
    async with (
        pod(reply) as served,
        scraping(endpoint(served.port), page_bytes_max=1000) as running,
    ):
        failed, told, sentence = await running.failures.get()
        await running.failures.get()
    assert (failed.name, told) == ("pod", kind)
    assert sentence.startswith(f"http://127.0.0.1:{served.port}/metrics ")
    assert re.search(words, sentence)
    assert running.observed.empty()


async def test_a_refused_connection_is_told():
    """Nobody listens there."""
    async with pod(GOOD) as served:
        port = served.port
    async with scraping(endpoint(port)) as running:
        _, kind, sentence = await running.failures.get()
    assert kind == "refused"
    assert "cannot be reached" in sentence


async def test_a_slow_page_times_out_and_the_connection_is_not_used_again():
    """What comes late must not be taken for the next answer."""
    never = asyncio.Event()

    async def reply(number, writer):
        if number == 1:
            writer.write(GOOD[:20])
            await writer.drain()
            await never.wait()
        writer.write(answer(page(2)))

    async with (
        pod(reply) as served,
        scraping(endpoint(served.port), timeout_s=0.05) as running,
    ):
        _, kind, sentence = await running.failures.get()
        assert kind == "timeout"
        assert sentence.endswith("sent no page within 0.05 s")
        _, metrics = await running.observed.get()
        assert metrics.waiting_requests == 2.0
        assert served.connections == 2
        never.set()


async def test_a_pod_that_comes_back_is_seen():
    """Failures make scrapes rarer, up to the cap, and the first good one ends that."""

    async def reply(number, writer):
        writer.write(GOOD if number > 6 else answer(b"", status=b"503 Starting"))

    async with pod(reply) as served, scraping(endpoint(served.port)) as running:
        for _ in range(3):
            assert (await running.observed.get())[1].waiting_requests == 1.0
        assert running.failures.qsize() == 6


def test_backoff_doubles_to_its_cap_and_is_jittered():
    """The first failure costs nothing: one lost packet must not make metrics stale."""
    running = Running(interval_s=lambda _: 0.5, backoff_s_max=5.0)
    for failures, mean_s in [
        (0, 0.5),
        (1, 0.5),
        (2, 1.0),
        (3, 2.0),
        (4, 4.0),
        (5, 5.0),
        (999, 5.0),
    ]:
        target = running.scraper._target(endpoint(1))
        target.failures = failures
        pauses = [running.scraper._pause_s(target) for _ in range(300)]
        assert mean_s * 0.9 <= min(pauses) < mean_s < max(pauses) <= mean_s * 1.1


def test_the_interval_grows_with_the_pool():
    """max(200 ms, 0.5 ms an endpoint)."""
    running = Running(interval_s=interval_s_by_pool)
    for count, interval_s in [(0, 0.2), (100, 0.2), (400, 0.2), (1000, 0.5)]:
        running.scraper.replace([endpoint(1, name=f"p{i}") for i in range(count)])
        assert running.scraper.interval_s == pytest.approx(interval_s)


@pytest.mark.parametrize("gone", [True, False])
async def test_what_is_on_its_way_from_a_replaced_endpoint_is_dropped(gone):
    """A page of the old container must not become the new one's metrics."""
    release = asyncio.Event()

    async def reply(number, writer):
        if number == 1:
            await release.wait()
        writer.write(answer(page(number)))

    async with pod(reply) as served, pod(answer(page(77))) as other:
        old = endpoint(served.port, incarnation="1")
        async with scraping(old) as running:
            await served.asked.wait()
            new = endpoint(other.port) if gone else endpoint(served.port, incarnation="2")
            running.scraper.replace([new])
            release.set()
            seen, metrics = await running.observed.get()
            assert seen is new
            assert metrics.waiting_requests == (77.0 if gone else 2.0)


async def test_a_relabelled_endpoint_keeps_its_connection():
    """Labels change often; the observation carries the latest endpoint."""
    async with pod(GOOD) as served, scraping(endpoint(served.port)) as running:
        await running.observed.get()
        relabelled = endpoint(served.port, labels={"a": "b"})
        running.scraper.replace([relabelled])
        while (await running.observed.get())[0] is not relabelled:
            pass
        assert served.connections == 1


async def test_no_more_scrapes_at_once_than_allowed():
    """Slow pods cannot take all connections at once."""
    at_once = most = 0
    turns = asyncio.Semaphore(0)

    async def reply(number, writer):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await turns.acquire()
        at_once -= 1
        writer.write(GOOD)

    async with pod(reply) as served:
        pods = [endpoint(served.port, name=f"p{i}") for i in range(8)]
        async with scraping(*pods, concurrency_max=2) as running:
            for _ in range(20):
                while at_once < 2:
                    await asyncio.sleep(0)
                turns.release()
                await running.observed.get()
        assert most == 2
        for _ in range(8):
            turns.release()


async def test_one_silent_pod_does_not_hold_up_the_others():
    """Each endpoint has its own pace."""
    never = asyncio.Event()

    async def silent(number, writer):
        await never.wait()

    async with pod(silent) as bad, pod(GOOD) as good:
        async with scraping(endpoint(bad.port, name="bad"), endpoint(good.port)) as running:
            for _ in range(5):
                assert (await running.observed.get())[0].name == "pod"
            assert running.failures.empty()
        never.set()


async def test_nothing_is_left_when_it_is_cancelled():
    """Every task and connection ends with `run`."""
    async with pod(GOOD) as served:
        async with scraping(endpoint(served.port), endpoint(served.port, name="b")) as running:
            await running.observed.get()
            assert scrape_tasks()
        assert not scrape_tasks()
        running.scraper.replace([endpoint(served.port, name="c")])
        assert not scrape_tasks()


def scrape_tasks():
    return [task for task in asyncio.all_tasks() if task.get_name().startswith("scrape ")]


async def test_one_that_refuses_is_asked_at_the_interval():
    """It costs nothing to ask, and it is seen as soon as it listens again, on the same port."""
    gap_s = 0.005
    async with pod(GOOD) as served:
        port = served.port
    async with scraping(
        endpoint(port), interval_s=lambda _: gap_s, backoff_s_max=1000.0
    ) as running:
        # Doubled each time, the last of these pauses would take minutes.
        async with asyncio.timeout(20):
            for _ in range(25):
                failed, kind, sentence = await running.failures.get()
                assert kind == "refused"
        assert running.scraper.problem_of(failed) == (kind, sentence)
        server = await asyncio.start_server(Pod(split(GOOD)).serve, "127.0.0.1", port)
        await running.observed.get()
        assert running.scraper.problem_of(failed) is None
        server.close()


async def test_one_that_serves_a_request_is_asked_again_at_once():
    """However long the pause that its failures have brought it, but not before its interval."""

    async def reply(number, writer):
        writer.write(GOOD if number > 12 else answer(b"", status=b"503 Starting"))

    async with (
        pod(reply) as served,
        scraping(
            endpoint(served.port), interval_s=lambda _: 0.001, backoff_s_max=1000.0
        ) as running,
    ):
        failed, _, _ = await running.failures.get()
        running.scraper._targets[failed.endpoint_id].failures = 30
        await running.failures.get()
        # The next would be due in a minute.
        async with asyncio.timeout(20):
            while running.observed.empty():
                running.scraper.answered(failed)
                await asyncio.sleep(0)
        assert running.scraper.problem_of(failed) is None
        assert served.requests == 13
        running.scraper.answered(failed)
        running.scraper.answered(endpoint(1, name="unknown"))


async def test_many_silent_endpoints_do_not_take_the_turns_of_others():
    """Those that failed wait in a line of their own."""
    never = asyncio.Event()

    async def silent(number, writer):
        await never.wait()

    async with pod(silent) as bad, pod(GOOD) as good:
        silent_ones = [endpoint(bad.port, name=f"bad-{number}") for number in range(8)]
        async with scraping(
            *silent_ones, concurrency_max=2, timeout_s=0.02, backoff_s_max=0.005
        ) as running:
            for _ in range(8):
                await running.failures.get()
            running.scraper.replace([*silent_ones, endpoint(good.port)])
            await running.observed.get()
            while not running.failures.empty():
                running.failures.get_nowait()
            for _ in range(10):
                await running.observed.get()
            # In one line each good page would wait for four of them.
            assert running.failures.qsize() <= 10
        never.set()


class Loop:
    """A clock of CPU time: each look at it costs so much."""

    def __init__(self, cost_s):
        self.now = 0.0
        self.cost_s = cost_s

    def __call__(self):
        self.now += self.cost_s
        return self.now


async def test_an_endpoint_with_dear_pages_is_asked_in_proportion_to_their_cost():
    """One per cent of the loop: what its pages take is a hundredth of the time between them."""
    loop = asyncio.get_running_loop()
    # Receiving and reading a page is measured from four looks, of which two pass inside.
    async with (
        pod(GOOD) as served,
        scraping(
            endpoint(served.port),
            backoff_s_max=10.0,
            clock=Loop(0.0003),
            interval_s=lambda _: 0.001,
        ) as running,
    ):
        await running.observed.get()
        started_s, asked = loop.time(), served.requests
        for _ in range(6):
            await running.observed.get()
        elapsed_s = loop.time() - started_s
    assert (served.requests - asked) * 2 * 0.0003 <= 0.01 * elapsed_s * 1.2
    assert running.failures.empty()


@pytest.mark.parametrize(
    "reply",
    [
        answer(page(1) + b"vllm:num_requests_running 1\n" * 10_000),
        split(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\nx\r\n" * 5_000,
            b"0\r\n\r\n",
        ),
    ],
    ids=["series", "chunks"],
)
async def test_a_page_beyond_a_limit_is_a_failed_scrape_that_is_paid_for(reply):
    """Counted as a page that cannot be read; the others are asked as before."""
    async with (
        pod(reply) as bad,
        pod(GOOD) as good,
        scraping(endpoint(bad.port, name="bad"), endpoint(good.port), timeout_s=1.0) as running,
    ):
        failed, kind, sentence = await running.failures.get()
        assert (failed.name, kind) == ("bad", "page")
        assert "more than" in sentence
        for _ in range(20):
            assert (await running.observed.get())[0].name == "pod"
        assert bad.requests < good.requests


async def test_what_an_owner_cannot_take_is_contained_and_told():
    """A page may say what nobody has thought of; it must not end the scraping of all others."""

    def observe(endpoint, metrics):
        raise OverflowError("too large to convert")

    running = Running()
    running.scraper = Scraper(
        observe,
        lambda endpoint, kind, sentence: running.failures.put_nowait((endpoint, kind, sentence)),
        reader=PageReader(),
        seed=1,
        interval_s=lambda _: 0.005,
        backoff_s_max=0.02,
    )
    async with pod(GOOD) as served:
        running.scraper.replace([endpoint(served.port)])
        task = asyncio.create_task(running.scraper.run())
        for _ in range(2):
            _, kind, sentence = await running.failures.get()
            assert kind == "internal"
            assert "OverflowError" in sentence
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_bug_in_a_reader_is_contained_and_told():
    """One page must not end the scraping of all the others."""

    class Broken(PageReader):
        def read(self, page, labels, memory=None):
            raise ZeroDivisionError

    running = Running()
    running.scraper.configure(Broken(), None, 0.0)
    async with pod(GOOD) as served:
        running.scraper.replace([endpoint(served.port)])
        task = asyncio.create_task(running.scraper.run())
        for _ in range(2):
            _, kind, sentence = await running.failures.get()
            assert kind == "internal"
            assert "ZeroDivisionError" in sentence
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def self_signed(tmp_path):
    """A server context with a certificate that nobody vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pod")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + timedelta(days=2))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("10.9.9.9"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    file = tmp_path / "tls.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context


async def test_https_is_scraped_without_verification(self_signed):
    """Pods sign their own certificates, for other names."""
    async with (
        pod(GOOD, tls=self_signed) as served,
        scraping(endpoint(served.port, scheme="https")) as running,
    ):
        for _ in range(2):
            assert (await running.observed.get())[1].waiting_requests == 1.0
        assert served.connections == 1


async def test_https_is_verified_where_it_is_to(tmp_path):
    """Who is vouched for is scraped, and nobody else."""
    mine, other = written(tmp_path, "mine"), written(tmp_path, "other")
    trust = client_context("", ca_cert_path=str(mine[0]))
    async with pod(GOOD, tls=serving_by(mine)) as good, pod(GOOD, tls=serving_by(other)) as bad:
        known = endpoint(good.port, scheme="https", name="known")
        stranger = endpoint(bad.port, scheme="https", name="stranger")
        async with scraping(known, stranger, trust=trust) as running:
            assert (await running.observed.get())[0] == known
            failing, kind, sentence = await running.failures.get()
            assert (failing, kind) == (stranger, "refused")
            assert "certificate" in sentence


async def test_endpoints_are_shown_the_certificate_that_they_ask_for(tmp_path):
    """Also by who believes whoever answers."""
    mine, own = written(tmp_path, "mine"), written(tmp_path, "own")
    source = MetricsDataSource(
        scheme=MetricsScheme.HTTPS,
        client_cert_path=str(own[0]),
        client_key_path=str(own[1]),
    )
    async with (
        pod(GOOD, tls=serving_by(mine, own[0])) as served,
        scraping(endpoint(served.port, scheme="https"), trust=trust_of(source)) as running,
    ):
        assert (await running.observed.get())[1].waiting_requests == 1.0


async def test_another_trust_holds_from_the_next_list_on(tmp_path):
    """Of endpoints that were connected to, too; those by http stay as they are."""
    mine = written(tmp_path, "mine")
    other = client_context("", ca_cert_path=str(written(tmp_path, "other")[0]))
    async with pod(GOOD, tls=serving_by(mine)) as served, pod(GOOD) as plain:
        secured, open_to_all = endpoint(served.port, scheme="https"), endpoint(plain.port)
        async with scraping(secured, open_to_all) as running:
            seen = set()
            while len(seen) < 2:
                seen.add((await running.observed.get())[0].endpoint_id)
            for trust, expected in ((other, "failures"), (None, "observed")):
                running.scraper.configure(PageReader(), trust, 0.0)
                running.scraper.replace((secured, open_to_all))
                told = getattr(running, expected)
                while not told.empty():
                    told.get_nowait()
                while (await told.get())[0] != secured:
                    pass
            assert plain.connections == 1


def test_a_longer_interval_of_the_configuration_holds():
    """A shorter one does not: what is decided by must not be older."""
    scraper = Running(interval_s=lambda _: 0.2, interval_s_min=3.0).scraper
    assert scraper.interval_s == 3.0
    scraper.configure(PageReader(), None, 0.1)
    assert scraper.interval_s == 0.2


class MillisecondLoop(asyncio.SelectorEventLoop):
    """Nobody waits: time is what the next timer says. It and timers are whole milliseconds, as uvloop's."""

    def __init__(self):
        super().__init__()
        self.now_ms = 1_000
        self.timers = self.timers_now = self.counted_ms = 0
        poll = self._selector.select

        def select(timeout):
            if timeout:
                self.now_ms += round(timeout * 1_000)
            return poll(0)

        self._selector.select = select

    def time(self):
        return self.now_ms / 1_000

    def call_later(self, delay, callback, *args, context=None):
        self.timers += 1
        self.timers_now = self.timers_now + 1 if self.now_ms == self.counted_ms else 0
        self.counted_ms = self.now_ms
        if self.timers_now > 5_000:
            raise RuntimeError("the loop is asked without end")
        return super().call_later(round(delay, 3), callback, *args, context=context)


class Pods:
    """Pods whose pages say what we choose, at once; `asked` has name and instant of each scrape."""

    def __init__(self, monkeypatch, count, *, interval_s=0.2, **adaptive):
        self.asked = []
        self.working = set()
        self.broken = set()
        self.endpoints = [endpoint(number, name=f"p{number}") for number in range(1, count + 1)]
        pods = self

        async def fetch(client, timeout_s):
            name = f"p{client._port}"
            pods.asked.append((name, asyncio.get_running_loop().time()))
            if name in pods.broken:
                raise TimeoutError
            return b"vllm:num_requests_waiting 0\nvllm:num_requests_running %d\n" % (
                name in pods.working
            )

        monkeypatch.setattr(PageClient, "fetch", fetch)
        # Time passes only in the loop. The CPU time of a busy machine would make pages look expensive.
        self.scraper = Running(
            interval_s=lambda _: interval_s, backoff_s_max=1.0, clock=lambda: 0.0, **adaptive
        ).scraper
        self.scraper.replace(self.endpoints)

    def run(self, scenario):
        """Run `scenario`, a coroutine function, beside the scraper; the loop that both ran on."""

        async def both():
            task = asyncio.create_task(self.scraper.run())
            await scenario()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        with asyncio.Runner(loop_factory=MillisecondLoop) as runner:
            runner.run(both())
            return runner.get_loop()

    def gaps(self, name):
        instants = [at for asked, at in self.asked if asked == name]
        return [after - before for before, after in pairwise(instants)]


def test_between_two_scrapes_an_endpoint_takes_one_timer(monkeypatch):
    """A wait that is shorter than the clock's tick would be asked for again and again."""
    pods = Pods(monkeypatch, 100)
    loop = pods.run(lambda: asyncio.sleep(10))
    assert len(pods.asked) > 4_500
    assert loop.timers <= len(pods.asked) + 200


@pytest.mark.parametrize(("count", "interval_s"), [(3, 0.2), (100, 0.2), (1_000, 0.5)])
def test_some_endpoints_are_asked_at_one_instant(monkeypatch, count, interval_s):
    """So many that their pages are cheaper, so few that they do not hold the loop; the pace stays."""
    pods = Pods(monkeypatch, count, interval_s=interval_s)
    pods.run(lambda: asyncio.sleep(20 * interval_s))
    settled = [at for _, at in pods.asked if at > 1 + 3 * interval_s]
    assert len(settled) == pytest.approx(17 * count, rel=0.05)
    assert all(0.8 * interval_s < gap < 1.2 * interval_s for gap in pods.gaps("p1"))
    together = len(settled) / len(set(settled))
    assert together <= TOGETHER + 1
    assert together > (0.6 * TOGETHER if count >= 100 else 0)


@pytest.mark.parametrize(
    ("interval_s", "oldest_s", "expected_s"),
    [(0.2, 1.0, 0.5), (0.2, 2.0, 1.0), (0.05, 1.0, 0.25), (0.5, 2.0, 1.0), (1.0, 1.0, 1.0)],
)
def test_idle_metrics_stay_young_enough_to_count(interval_s, oldest_s, expected_s):
    """At most five intervals, at most half of what would count for nothing, at least the interval."""
    assert idle_interval_s(interval_s, oldest_s) == pytest.approx(expected_s)


def test_idle_endpoints_are_asked_seldom_and_busy_ones_as_always(monkeypatch):
    """By what the engine says, by what we sent there, and by a scrape that failed."""
    sent = set()
    pods = Pods(
        monkeypatch, 4, idle_oldest_s=lambda: 1.0, busy=lambda endpoint: endpoint.name in sent
    )
    pods.working.add("p1")
    sent.add("p2")
    pods.broken.add("p3")
    pods.run(lambda: asyncio.sleep(20))
    asked = {name: sum(1 for told, _ in pods.asked if told == name) for name in ("p1", "p2", "p4")}
    assert asked["p1"] == pytest.approx(100, rel=0.05)
    assert asked["p2"] == pytest.approx(100, rel=0.05)
    assert asked["p4"] == pytest.approx(40, rel=0.05)
    assert max(pods.gaps("p4")) < 0.6
    # One that fails is asked again after an interval, not when an idle one would be.
    assert pods.gaps("p3")[0] < 0.25


def test_an_endpoint_that_fell_idle_fails_once_and_is_still_young_enough(monkeypatch):
    """Two scrapes fit into what its metrics may become old."""
    pods = Pods(monkeypatch, 1, idle_oldest_s=lambda: 1.0)

    async def scenario():
        await asyncio.sleep(3)
        good_at = pods.asked[-1][1]
        pods.broken.add("p1")
        while pods.asked[-1][1] == good_at:
            await asyncio.sleep(0.01)
        pods.broken.clear()
        failed_at = pods.asked[-1][1]
        while pods.asked[-1][1] == failed_at:
            await asyncio.sleep(0.01)
        assert pods.asked[-1][1] - good_at < 1.0

    pods.run(scenario)


def test_a_picked_endpoint_is_asked_when_it_would_have_been_without_adaptive_scraping(monkeypatch):
    """A burst after idleness: within one interval of the pick, and once, however many picks."""
    pods = Pods(monkeypatch, 1, idle_oldest_s=lambda: 10.0)
    waits = []

    async def scenario():
        for number in range(30):
            before = len(pods.asked)
            while len(pods.asked) == before:
                await asyncio.sleep(0.001)
            # At various instants of the second until it would be asked again.
            await asyncio.sleep(0.03 * number)
            before, picked_at = len(pods.asked), asyncio.get_running_loop().time()
            for _ in range(5):
                pods.scraper.picked(pods.endpoints[0])
            pods.scraper.picked(endpoint(1, name="unknown"))
            while len(pods.asked) == before:
                await asyncio.sleep(0.001)
            waits.append(pods.asked[-1][1] - picked_at)
            await asyncio.sleep(0.0)
            assert len(pods.asked) == before + 1

    pods.run(scenario)
    assert max(waits) <= 0.2 * 1.05 + 0.002
    assert sum(waits) / len(waits) < 0.15


def test_without_adaptive_scraping_idle_endpoints_are_asked_as_always(monkeypatch):
    """And a pick changes nothing."""
    pods = Pods(monkeypatch, 1)

    async def scenario():
        for _ in range(100):
            await asyncio.sleep(0.1)
            pods.scraper.picked(pods.endpoints[0])

    pods.run(scenario)
    assert len(pods.asked) == pytest.approx(50, rel=0.06)


async def test_a_page_that_was_read_is_not_held_until_the_next():
    """Megabytes that a hostile endpoint sends are gone as soon as they are judged."""
    served_body = answer(page(1) + b"#" * 2**21)
    async with (
        pod(served_body) as served,
        scraping(endpoint(served.port), interval_s=lambda _: 1.0) as running,
    ):
        await running.observed.get()
        tracemalloc.start()
        try:
            await running.observed.get()
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert served.connections == 1
    assert peak > 2**21
    assert held < 2**20
