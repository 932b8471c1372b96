"""A gateway on its own thread, with answers that a test chooses. It keeps the requests."""

import asyncio
import json
import threading
from contextlib import contextmanager

from aiohttp import web


class Gateway:
    def __init__(self, pods=("pod-0", "pod-1")):
        self.pods = pods
        self.asked = []
        """Received requests as (path, headers, body)."""
        self.held = threading.Event()
        self.held.set()
        self.answers = self.stream
        self.models = self.no_models
        """Handler of requests for the list of served models."""
        self.url = ""

    async def handle(self, request):
        body = await request.json()
        self.asked.append((request.path_qs, dict(request.headers), body))
        while not self.held.is_set():
            await asyncio.sleep(0.002)
        return await self.answers(request, body)

    async def stream(self, request, body):
        pod = self.pods[len(self.asked) % len(self.pods)] if self.pods else None
        headers = {"x-homing-endpoint": pod} if pod else {}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        tokens = body["max_tokens"]
        for _ in range(tokens):
            await response.write(b'data: {"choices": [{"text": "tok "}]}\n\n')
        usage = {
            "prompt_tokens": len(body.get("prompt", "")) // 4,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 64},
        }
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def no_models(self, request):
        return web.Response(status=404)

    def serve(self, *names):
        """List these models from now on; requests for other models are still served."""

        async def listed(request):
            return web.json_response({"object": "list", "data": [{"id": name} for name in names]})

        self.models = listed

    async def models_asked(self, request):
        return await self.models(request)

    async def refuse(self, request, body):
        return web.Response(status=503, text="no room for " + body["prompt"][:10])

    async def redirect(self, request, body):
        return web.Response(status=307, headers={"location": "http://127.0.0.1:1/elsewhere"})


@contextmanager
def gateway(**more):
    """Yield a gateway that runs on a free port until the context ends."""
    served = Gateway(**more)
    loop = asyncio.new_event_loop()
    started = threading.Event()
    application = web.Application()
    application.add_routes(
        [web.get("/v1/models", served.models_asked), web.post("/{path:.*}", served.handle)]
    )
    runner = web.AppRunner(application, shutdown_timeout=0.1)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        served.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        started.set()

    def run():
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield served
    finally:
        served.held.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
