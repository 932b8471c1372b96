"""A small API server that can be as bad as a real one on a bad day, for tests.

It keeps objects with resource versions, lists them in pages, watches with label and field
selectors, and has faults on demand: `fail` for whole requests to come, `disturb` for open watches.
"""

import asyncio
import json
from collections import defaultdict, deque
from itertools import count

from aiohttp import web

PODS = "/api/v1/namespaces/llm/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools"
OBJECTIVES = "/apis/llm-d.ai/v1alpha2/namespaces/llm/inferenceobjectives"
REWRITES = "/apis/llm-d.ai/v1alpha2/namespaces/llm/inferencemodelrewrites"
OLD_OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/llm/inferenceobjectives"
CONFIG_MAPS = "/api/v1/namespaces/llm/configmaps"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/llm/leases"
EVENTS = "/api/v1/namespaces/llm/events"

_uids = count(1)


def pod(name, *, ip=None, uid=None, ready=True, labels=None, ports=(8000,), **fields):
    """Return a Pod, which is Ready by default."""
    number = next(_uids)
    return {
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": uid or f"uid-{number}",
            "labels": {"app": "llama"} if labels is None else labels,
            **fields,
        },
        "spec": {
            "containers": [{"name": "vllm", "ports": [{"containerPort": port} for port in ports]}]
        },
        "status": {
            "phase": "Running",
            "podIP": ip or f"10.0.{number // 250 % 250}.{number % 250 + 1}",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [
                {"name": "vllm", "restartCount": 0, "containerID": f"containerd://{number}"}
            ],
        },
    }


def pool(name="llama-pool", *, labels=None, ports=(8000,), uid=None):
    return {
        "metadata": {"name": name, "namespace": "llm", "uid": uid or f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": labels or {"app": "llama"}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
        },
    }


def objective(name, priority, pool_name="llama-pool"):
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"priority": priority, "poolRef": {"name": pool_name}},
    }


def rewrite(name, rules, *, created="2026-01-01T00:00:00Z", pool_name="llama-pool"):
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "creationTimestamp": created},
        "spec": {"poolRef": {"name": pool_name}, "rules": rules},
    }


class FakeApiServer:
    """API server that runs within its async context; `stop` and `start` keep its `port`."""

    def __init__(self, *, bookmark_s=0.05, absent=(), tls=None, streams="yes"):
        self.bookmark_s = bookmark_s
        self.streams = streams
        """Support for streamed lists.

        "yes" streams them, and "no" answers with 422. "old" ignores `sendInitialEvents`, so that no
        bookmark ends the list.
        """
        self.tls = tls
        """The server's `ssl.SSLContext`; None for plaintext."""
        self.absent = set(absent)
        """Paths of kinds whose CRD is missing."""
        self.tokens = None
        """Accepted tokens; None if any token is accepted, and also its absence."""
        self.version = 100
        self.compacted = 0
        """Oldest version that a watch may begin at; earlier ones are refused with 410."""
        self.objects = defaultdict(dict)
        self.history = []
        """Changes as (version, path, object before or None, object after or None)."""
        self.requests = []
        """Received requests as (time, verb, path, query), in order."""
        self.port = 0
        self._faults = defaultdict(deque)
        self._orders = []
        """Pending orders of `disturb`, one deque per open watch."""
        self._news = asyncio.Event()
        self._runner = None

    # Truth.

    def put(self, path, item):
        """Create or replace an object."""
        self.version += 1
        item = json.loads(json.dumps(item))
        item["metadata"]["resourceVersion"] = str(self.version)
        name = item["metadata"]["name"]
        before = self.objects[path].get(name)
        if before is not None and before["metadata"]["uid"] != item["metadata"]["uid"]:
            self.delete(path, name)
            self.put(path, item)
            return
        self.objects[path][name] = item
        self._happened(path, before, item)

    def delete(self, path, name):
        self.version += 1
        before = self.objects[path].pop(name)
        self._happened(path, before, None)

    def compact(self):
        """Forget all history, as etcd does."""
        self.compacted = self.version
        self.history.clear()

    def _happened(self, path, before, after):
        self.history.append((self.version, path, before, after))
        self._wake()

    def _wake(self):
        news, self._news = self._news, asyncio.Event()
        news.set()

    # Faults.

    def fail(self, verb, path, *faults):
        """Give the next requests these faults, one each.

        A fault is a status, (status, headers), "reset", "silent" or "garbage". Requests with "pass"
        and "slow" are answered, the latter after 0.2 s.
        """
        self._faults[verb, path].extend(faults)

    def faults(self, verb, path):
        """Return how many faults are still to come."""
        return len(self._faults[verb, path])

    def heal(self):
        """Drop all faults that are still to come."""
        self._faults.clear()

    def disturb(self, order):
        """Disturb every open watch.

        `order` is "close", "reset", "silent", "half", "half-close", "garbage", "gone", "error",
        "duplicate" or "reorder".
        """
        for orders in self._orders:
            orders.append(order)
        self._wake()

    @property
    def open_watches(self):
        return len(self._orders)

    def lists(self, path):
        """Return the start times of the lists of `path`, without their further pages."""
        return [
            at
            for at, verb, where, query in self.requests
            if verb == "LIST" and where == path and "continue" not in query
        ]

    # Server.

    async def start(self):
        application = web.Application(client_max_size=8 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self.tls
        )
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self):
        self.disturb("reset")
        await self._runner.cleanup()

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, folder, token="first"):
        """Write a kubeconfig into `folder`; return its path."""
        path = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": self.url}}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path.write_text(json.dumps(config))
        return path

    async def _handle(self, request):
        path = request.path
        query = dict(request.query)
        verb = {"GET": "LIST", "POST": "CREATE", "PUT": "UPDATE"}[request.method]
        if query.get("watch") == "true" and "sendInitialEvents" not in query:
            verb = "WATCH"
        collection, _, name = path.rpartition("/")
        if verb in {"LIST", "UPDATE"} and collection == LEASES:
            verb = "GET" if verb == "LIST" else verb
        else:
            collection, name = path, ""
        self.requests.append((asyncio.get_running_loop().time(), verb, collection, query))
        token = request.headers.get("authorization", "").partition(" ")[2]
        if self.tokens is not None and token not in self.tokens:
            return _status(401, "Unauthorized")
        if self._faults[verb, collection]:
            answer = await self._fail(request, self._faults[verb, collection].popleft())
            if answer is not None:
                return answer
        if collection in self.absent:
            return _status(404, "the server could not find the requested resource")
        if verb == "LIST" and "sendInitialEvents" not in query:
            return self._list(collection, query)
        if verb in {"LIST", "WATCH"}:
            answer = self._watch if verb == "WATCH" else self._stream_list
            return await answer(request, collection, query)
        return await self._object(request, verb, collection, name)

    async def _fail(self, request, fault):
        if fault == "reset":
            request.transport.abort()
            return web.Response()
        if fault == "silent":
            await asyncio.sleep(30)
        if fault == "garbage":
            return web.Response(text='{"items": [')
        if fault == "slow":
            await asyncio.sleep(0.2)
            return None
        if fault == "pass":
            return None
        status, headers = fault if isinstance(fault, tuple) else (fault, {})
        return _status(status, f"fault {status}", headers)

    def _list(self, path, query):
        token = query.get("continue", "")
        version, start = map(int, token.split(":")) if token else (self.version, 0)
        if token and version < self.compacted:
            return _status(410, "The provided continue parameter is too old")
        chosen = _chosen(self._at(path, version), query)
        limit = int(query.get("limit", "500"))
        page, rest = chosen[start : start + limit], chosen[start + limit :]
        metadata = {"resourceVersion": str(version)}
        if rest:
            metadata["continue"] = f"{version}:{start + limit}"
        return web.json_response({"metadata": metadata, "items": page})

    def _at(self, path, version):
        """Return the objects as they were at `version`. Later changes are undone."""
        objects = dict(self.objects[path])
        for at, where, before, after in reversed(self.history):
            if where == path and at > version:
                name = (before or after)["metadata"]["name"]
                if before is None:
                    objects.pop(name, None)
                else:
                    objects[name] = before
        return [objects[name] for name in sorted(objects)]

    async def _stream_list(self, request, path, query):
        if self.streams == "no":
            return _status(422, "sendInitialEvents is forbidden for watch")
        assert query["resourceVersionMatch"] == "NotOlderThan"
        assert "resourceVersion" not in query
        version = self.version
        chosen = _chosen(self._at(path, version), query)
        lines = [_line({"type": "ADDED", "object": item}) for item in chosen]
        if self.streams == "yes":
            mark = {
                "resourceVersion": str(version),
                "annotations": {"k8s.io/initial-events-end": "true"},
            }
            lines.append(_line({"type": "BOOKMARK", "object": {"metadata": mark}}))
        return await self._watch(request, path, query, version, lines)

    async def _watch(self, request, path, query, version=None, lines=()):
        """Stream `lines`, then the changes after `version`; None means the requested version."""
        version = int(query["resourceVersion"]) if version is None else version
        if version < self.compacted:
            return _status(410, "too old resource version")
        orders = deque()
        self._orders.append(orders)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                for line in lines:
                    await response.write(line)
                await self._stream(request, response, path, query, version, orders)
        except (TimeoutError, ConnectionError):
            pass
        finally:
            # By identity: two empty deques are equal.
            self._orders = [other for other in self._orders if other is not orders]
        return response

    async def _stream(self, request, response, path, query, version, orders):
        last = {}
        while True:
            news = self._news
            pending = [entry for entry in self.history if entry[0] > version and entry[1] == path]
            lines = [line for line in (_event(entry, query) for entry in pending) if line]
            version = max([version, *(entry[0] for entry in pending)])
            while orders:
                order = orders.popleft()
                if order == "duplicate":
                    lines = [line for line in lines for _ in range(2)] or list(last.values())
                elif order == "reorder":
                    lines[:2] = reversed(lines[:2])
                elif await self._break(request, response, order):
                    return
            for line in lines:
                last[line["object"]["metadata"]["name"]] = line
            if lines:
                await response.write(b"".join(_line(line) for line in lines))
            try:
                await asyncio.wait_for(news.wait(), self.bookmark_s)
            except TimeoutError:
                if news is not self._news:
                    # Both at once, on a busy machine: a bookmark would leave out what has happened.
                    continue
                version = max(version, self.version)
                mark = {"metadata": {"resourceVersion": str(version)}}
                await response.write(_line({"type": "BOOKMARK", "object": mark}))

    async def _break(self, request, response, order):
        if order == "silent":
            await asyncio.sleep(30)
        if order == "garbage":
            await response.write(b'{"type": "ADDED", "object": 7}\n')
        if order in {"gone", "error"}:
            code = 410 if order == "gone" else 500
            await response.write(
                _line({"type": "ERROR", "object": {"code": code, "message": "no more"}})
            )
        if order in {"half", "half-close"}:
            await response.write(b'{"type": "ADDED", "object": {"metadata": {"na')
        if order in {"half", "reset"} and request.transport is not None:
            request.transport.abort()
        return True

    async def _object(self, request, verb, collection, name):
        if verb == "GET":
            found = self.objects[collection].get(name)
            return web.json_response(found) if found else _status(404, f"{name} not found")
        item = await request.json()
        name = item["metadata"]["name"]
        item["metadata"].setdefault("uid", f"uid-{name}")
        found = self.objects[collection].get(name)
        told = item["metadata"].pop("resourceVersion", "")
        stale = found is not None and told != found["metadata"]["resourceVersion"]
        if (verb == "CREATE" and found) or (verb == "UPDATE" and stale):
            return _status(409, "the object has been modified")
        self.put(collection, item)
        return web.json_response(self.objects[collection][name])


def _status(code, message, headers=None):
    body = {"kind": "Status", "code": code, "message": message}
    return web.json_response(body, status=code, headers=headers)


def _line(event):
    return json.dumps(event).encode() + b"\n"


def _matches(item, query):
    if item is None:
        return False
    labels = item["metadata"].get("labels", {})
    wanted = [part.split("=") for part in query.get("labelSelector", "").split(",") if part]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in {
        "",
        item["metadata"]["name"],
    }


def _chosen(items, query):
    return [item for item in items if _matches(item, query)]


def _event(entry, query):
    """Return the event that a watch with these selectors sees, or None if it sees none."""
    version, _, before, after = entry
    was, is_ = _matches(before, query), _matches(after, query)
    if not was and not is_:
        return None
    kind = "ADDED" if not was else "MODIFIED" if is_ else "DELETED"
    shown = json.loads(json.dumps(after if is_ else before))
    shown["metadata"]["resourceVersion"] = str(version)
    return {"type": kind, "object": shown}
