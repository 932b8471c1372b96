"""The engine told plainly, as vLLM has it: every block by its number, every pass done alone.

What `sim/engine/engine.py` and `sim/engine/blocks.py` must agree with; slow and short on purpose.
"""

from collections import OrderedDict, deque

from sim.engine.profiles import StepWork


class PlainPool:
    """Blocks by number, each with its hash; the free ones in the order in which they are taken."""

    def __init__(self, blocks_total):
        self.free = OrderedDict.fromkeys(range(1, blocks_total))
        self.holders = [0] * blocks_total
        self.hash_of = [None] * blocks_total
        self.with_hash = {}

    def match(self, chain, blocks_max):
        hit = []
        for block_hash in chain[:blocks_max]:
            if block_hash not in self.with_hash:
                break
            hit.append(self.with_hash[block_hash][0])
        return hit

    def hold(self, blocks):
        for block in blocks:
            self.free.pop(block, None)
            self.holders[block] += 1

    def take(self, count):
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.holders[block] = 1
            block_hash, self.hash_of[block] = self.hash_of[block], None
            if block_hash is not None:
                self.with_hash[block_hash].remove(block)
                if not self.with_hash[block_hash]:
                    del self.with_hash[block_hash]
        return taken

    def register(self, blocks, hashes):
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.hash_of[block] = block_hash
            self.with_hash.setdefault(block_hash, []).append(block)

    def release(self, blocks):
        for block in reversed(blocks):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.free[block] = None
                if self.hash_of[block] is None:
                    self.free.move_to_end(block, last=False)


class PlainRequest:
    """`chain`: the hash of every full block."""

    def __init__(self, request_id, prompt_tokens, output_tokens, chain, adapter):
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.chain = chain
        self.adapter = adapter
        self.first_token_at = self.last_token_at = self.cached_tokens = None
        self.generated = self.computed = self.registered = self.preemptions = 0
        self.shared = 0
        self.decoding = False
        self.blocks = []

    @property
    def known(self):
        return self.prompt_tokens + self.generated


class PlainEngine:
    """`step(now)` does one pass and says when it ends; None if there is nothing to do."""

    def __init__(self, settings, profile):
        self.settings = settings
        self.profile = profile
        self.pool = PlainPool(settings.blocks_total)
        self.running = []
        self.waiting = deque()
        self.resident = OrderedDict()

    def abort(self, request):
        if request in self.running:
            self.running.remove(request)
            self.pool.release(request.blocks)
        elif request in self.waiting:
            self.waiting.remove(request)

    def step(self, now):
        if not self.running and not self.waiting:
            return None
        work = StepWork()
        self.chunks = []
        scheduled, budget, preempted = self.go_on(work)
        if not preempted:
            self.admit(work, scheduled, budget)
        copies = sum(holders - 1 for holders in self.pool.holders if holders)
        copies -= sum(request.shared for request in self.chunks)
        work.shared_tokens = max(0, copies) * self.settings.block_size_tokens
        ends_at = now + self.profile.step_s(work)
        for request in scheduled:
            if request.computed == request.known:
                request.decoding = True
                request.generated += 1
                request.first_token_at = request.first_token_at or ends_at
                request.last_token_at = ends_at
                if request.generated == request.output_tokens:
                    self.running.remove(request)
                    self.pool.release(request.blocks)
        return ends_at

    def go_on(self, work):
        budget, scheduled, preempted, index = self.settings.max_num_batched_tokens, [], False, 0
        while index < len(self.running) and budget:
            request = self.running[index]
            tokens = min(request.known - request.computed, budget)
            while not self.grow(request, tokens):
                victim = self.running.pop()
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                self.schedule(request, tokens, work)
                scheduled.append(request)
                budget -= tokens
                index += 1
        return scheduled, budget, preempted

    def admit(self, work, scheduled, budget):
        size = self.settings.block_size_tokens
        active = {request.adapter for request in self.running if request.adapter}
        passed_over = []
        while self.waiting and budget and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            adapter = request.adapter
            if adapter and adapter not in active and len(active) >= self.settings.max_loras:
                passed_over.append(self.waiting.popleft())
                continue
            hit = self.pool.match(request.chain, (request.known - 1) // size)
            idle = sum(1 for block in hit if not self.pool.holders[block])
            if -(-request.known // size) - len(hit) + idle > len(self.pool.free):
                break
            if not self.settings.chunked_prefill and request.known - len(hit) * size > budget:
                break
            self.waiting.popleft()
            request.shared = len(hit) - idle
            self.pool.hold(hit)
            request.blocks = hit
            request.registered = len(hit)
            request.computed = len(hit) * size
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
            if adapter:
                active.add(adapter)
                if adapter not in self.resident:
                    work.adapters_loaded += 1
                    if len(self.resident) >= self.settings.max_loras:
                        del self.resident[next(n for n in self.resident if n not in active)]
                self.resident[adapter] = None
                self.resident.move_to_end(adapter)
            tokens = min(request.known - request.computed, budget)
            assert self.grow(request, tokens)
            self.schedule(request, tokens, work)
            self.running.append(request)
            scheduled.append(request)
            budget -= tokens
        self.waiting.extendleft(reversed(passed_over))

    def grow(self, request, tokens):
        size = self.settings.block_size_tokens
        missing = -(-(request.computed + tokens) // size) - len(request.blocks)
        if missing > len(self.pool.free):
            return False
        request.blocks += self.pool.take(max(0, missing))
        return True

    def schedule(self, request, tokens, work):
        context = request.computed
        if not request.decoding:
            self.chunks.append(request)
        work.tokens += tokens
        if tokens == 1 and request.generated:
            work.decodes += 1
            work.decode_context_tokens += context + 1
            work.longest_context_tokens = max(work.longest_context_tokens, context + 1)
        else:
            work.prefills += 1
            work.attention_pairs += tokens * (context + tokens / 2)
        work.with_adapter |= bool(request.adapter)
        request.computed += tokens
        work.sequences += request.computed == request.known
        full = request.computed // self.settings.block_size_tokens
        new = slice(request.registered, full)
        self.pool.register(request.blocks[new], request.chain[new])
        request.registered = max(full, request.registered)

    def preempt(self, request):
        self.pool.release(request.blocks)
        request.blocks = []
        request.decoding = False
        request.registered = request.computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)
