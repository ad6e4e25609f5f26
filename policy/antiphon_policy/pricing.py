"""What one worker, or one pair of workers, costs for one request: the terms of `routing`, one function each.

`Prices` knows the request and what the fleet's workload is like; it is asked about workers one at a time.
`worker_table` computes the same sums for all workers at once, to find the few that are worth being asked about here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from antiphon_policy.latency import transfer_ms
from antiphon_policy.route_records import CostParts, RouteOption, RouteRequest, WorkerRole, WorkerView, Workload

DEFAULT_LINK_GIGABYTES_PER_S = 1.0
"""For links that nobody has measured yet."""

REMOTE_MS = 0.5
"""One more hop on the way of a request: opening `Prefill.Run` on P."""

PULL_MARGIN = 0.8
"""A prefix is pulled where that takes less than this share of computing it."""

PREFIX_PEERS = 3

BROKEN_MS = 1e9
"""More than anything costs: what breaks a promise comes after all that keeps it."""

Holder = tuple[WorkerView, int]
"""(worker, leading blocks of the request's chain that it holds)"""


class _Decoding(msgspec.Struct, frozen=True, gc=False):
    """One worker as D, whoever is P."""

    held: int
    queue_ms: float
    """Of the prompts that it computes itself."""
    join_ms: float
    bare_tpot_ms: float
    """Without those prompts."""
    tpot_ms: float
    stream_ms: float
    delay_ms: float
    recompute_ms: float


class _Prefilling(msgspec.Struct, frozen=True, gc=False):
    """One worker as P, whoever is D."""

    blocks: int
    """That need not be computed: its own, or with those that it pulls."""
    queue_ms: float
    pull_ms: float
    compute_ms: float
    delay_ms: float
    recompute_ms: float


class Prices:
    """Prices for one request. `followers`: requests that will wait for one that is queued now, on prefill workers and
    on those that decode (see `prefill_delay_ms`)."""

    def __init__(
        self,
        request: RouteRequest,
        workload: Workload,
        links: Mapping[tuple[str, str], float],
        holders: Sequence[Holder],
        followers: float,
        followers_on_decoders: float = 0.0,
    ) -> None:
        self._request = request
        self._workload = workload
        self._links = links
        self._holders = holders
        self._holder_ids = {view.worker_id for view, _ in holders}
        self._decoding_of: dict[str, _Decoding] = {}
        self._prefilling_of: dict[str, _Prefilling] = {}
        self.followers = followers
        self.followers_on_decoders = followers_on_decoders
        self.evicted_reuse = workload.evicted_reuse
        self.prompt_tokens = max(1, request.prompt_tokens)
        self.block_tokens = max(1, request.block_tokens)
        # A full hit still recomputes the last token.
        self.usable_blocks = (self.prompt_tokens - 1) // self.block_tokens
        self.prompt_blocks = -(-self.prompt_tokens // self.block_tokens)
        # Nobody knows how long an answer will be: as long as those of late, or its limit if that is less.
        self.output_tokens = max(1.0, min(float(request.max_tokens), workload.output_tokens))
        self.all_blocks = int(-(-(self.prompt_tokens + self.output_tokens) // self.block_tokens))
        self.stream_share = self._stream_share()
        self.short_tokens = max(1.0, min(workload.output_tokens, workload.short_output_tokens))
        self.decode_context = self.prompt_tokens + self.output_tokens / 2
        """Of the answer at half its length."""
        self._later_tokens = self.stream_share * max(0.0, self.output_tokens - 2.0)
        """After the second, in shares (`_stream_share`)."""
        self._all_tokens = self.stream_share * self.output_tokens
        self._promises = request.ttft_limit_ms is not None or request.tpot_limit_ms is not None

    def _stream_share(self) -> float:
        """What a millisecond between tokens counts for. Where there are promises, time is counted in shares of them: a
        millisecond of 500 to the first token is as much as forty of 20,000 for an answer. Without, all count alike."""
        tpot_ms, ttft_ms = self._request.tpot_limit_ms, self._workload.ttft_limit_ms
        if tpot_ms is None or ttft_ms is None:
            return 1.0
        return ttft_ms / (max(1.0, self._workload.output_tokens) * tpot_ms)

    # -- terms of one worker

    def cached(self, leading_blocks: int) -> int:
        return min(leading_blocks, self.usable_blocks)

    def queue_ms(self, worker: WorkerView) -> float:
        """Prompts ahead are computed first."""
        queued_tokens = worker.queued_tokens
        if not queued_tokens:
            return 0.0
        return worker.step.prefill_ms(new_tokens=queued_tokens, chunk_tokens=worker.chunk_tokens)

    def compute_ms(self, worker: WorkerView, cached_blocks: int) -> float:
        """The prompt's chunks, each in a step that the worker's decodes share."""
        cached_tokens = cached_blocks * self.block_tokens
        new_tokens = self.prompt_tokens - cached_tokens
        step = worker.step
        alone_ms = step.prefill_ms(new_tokens=new_tokens, cached_tokens=cached_tokens, chunk_tokens=worker.chunk_tokens)
        if worker.role is WorkerRole.PREFILL:
            return alone_ms
        steps = -(-new_tokens // worker.chunk_tokens)
        return alone_ms + steps * (
            worker.running * (step.per_new_token_ms + step.per_sequence_ms) + worker.kv_tokens * step.per_kv_token_ms
        )

    def _decoding(self, worker: WorkerView, held: int) -> _Decoding:
        """The worker as D, whoever is P."""
        known = self._decoding_of.get(worker.worker_id)
        if known is not None:
            return known
        step, running, queued_tokens = worker.step, worker.running, worker.queued_tokens
        sequence_ms = step.per_new_token_ms + step.per_sequence_ms
        context_ms = step.per_token_context_ms + step.per_kv_token_ms
        # A step of its batch with one sequence more, whose context comes on top: at first the prompt, then that and
        # half of its answer.
        step_ms = step.base_ms + (running + 1) * sequence_ms + worker.kv_tokens * context_ms
        join_ms = step_ms + self.prompt_tokens * context_ms
        bare_tpot_ms = tpot_ms = step_ms + self.decode_context * context_ms
        queue_ms = 0.0
        if queued_tokens:
            # The step that brings the second token has a chunk of a prompt in it if one waits.
            chunk = min(queued_tokens, worker.chunk_tokens)
            join_ms += chunk * (step.per_new_token_ms + chunk * step.per_token_context_ms)
            queue_ms = self.queue_ms(worker)
            tpot_ms += self.beside_prompts_ms(worker, queue_ms)
        held = min(held, self.usable_blocks)
        known = self._decoding_of[worker.worker_id] = _Decoding(
            held,
            queue_ms,
            join_ms,
            bare_tpot_ms,
            tpot_ms,
            # Its tokens after the second. Without this term a worker with few long answers looks as good as one with
            # few short ones.
            self._later_tokens * bare_tpot_ms,
            # Every further step of every running request gets longer by this request's share.
            self._all_tokens * running * (sequence_ms + self.decode_context * context_ms),
            self.recompute_ms(worker, self.all_blocks - held),
        )
        return known

    def prefill_delay_ms(self, worker: WorkerView, compute_ms: float) -> float:
        """Requests that come while it waits or is computed wait for it; and where answers run, each of them does."""
        waiting = self.followers
        if worker.role is not WorkerRole.PREFILL:
            waiting = self.followers_on_decoders
            # A worker of the decode pool counts one more than it runs: the one that comes next. So an idle decode pool
            # leaves prompts to an idle prefill pool, unless little of them is left to compute.
            waiting += self.stream_share * (worker.running + (1 if worker.role is WorkerRole.DECODE else 0))
        return waiting * compute_ms

    def beside_prompts_ms(self, worker: WorkerView, prompts_ms: float) -> float:
        """What is added to each token of the answers of a worker that computes prompts for `prompts_ms` too: at most a
        whole chunk for each; and spread over the tokens of a short answer, at most that time."""
        if prompts_ms <= 0.0:
            return 0.0
        step = worker.step
        chunk_ms = (
            worker.chunk_tokens * (step.per_new_token_ms + step.per_token_context_ms * self.prompt_tokens)
            + step.per_kv_token_ms * self.prompt_tokens
        )
        return min(chunk_ms, prompts_ms / self.short_tokens)

    def recompute_ms(self, worker: WorkerView, stored_blocks: int) -> float:
        """Blocks that are stored push others out, of which some are asked for again. Where even what can be pushed out
        is short, running requests are, and their tokens have to be computed again for certain."""
        if worker.total_blocks <= 0:
            return 0.0
        evicted = stored_blocks - worker.empty_blocks
        if evicted <= 0:
            return 0.0
        block_ms = self.block_tokens * worker.step.per_new_token_ms
        ms = evicted * block_ms * self.evicted_reuse
        short = stored_blocks - worker.free_blocks
        if short > 0:
            ms += worker.step.prefill_ms(new_tokens=short * self.block_tokens, chunk_tokens=worker.chunk_tokens)
        return ms

    # -- options

    def local(self, worker: WorkerView, leading_blocks: int) -> RouteOption:
        decoding = self._decoding(worker, leading_blocks)
        blocks, pull_ms = decoding.held, 0.0
        if self._holders and (peers := self.peers(worker, leading_blocks)):
            _, blocks, pull_ms = peers[0]
        compute_ms = self.compute_ms(worker, blocks)
        parts = CostParts(
            queue_ms=decoding.queue_ms,
            pull_ms=pull_ms,
            compute_ms=compute_ms,
            transfer_ms=0.0,
            join_ms=decoding.join_ms,
            stream_ms=decoding.stream_ms,
            delay_ms=self.prefill_delay_ms(worker, compute_ms) + decoding.delay_ms,
            recompute_ms=decoding.recompute_ms,
        )
        keeps, tpot_ms = True, decoding.bare_tpot_ms
        if self._promises:
            worst_tpot_ms = tpot_ms
            if worker.running:
                worst_tpot_ms += self.beside_prompts_ms(worker, parts.queue_ms + compute_ms)
            keeps = self._keeps(parts.ttft_ms, worst_tpot_ms)
        return RouteOption(worker.worker_id, None, parts, tpot_ms, keeps)

    def remote(self, decoder: WorkerView, held: int, prefiller: WorkerView, leading_blocks: int) -> RouteOption:
        """`held`: leading blocks that the decoder holds."""
        decoding = self._decoding(decoder, held)
        prefilling = self._prefilling(prefiller, leading_blocks)
        held = decoding.held
        if held > prefilling.blocks and decoder.worker_id not in self._holder_ids:
            prefilling = self._prefilling_with(prefiller, leading_blocks, (decoder, held))
        to_move = self.prompt_blocks - held
        transferring_ms = 0.0
        if to_move:
            speed = self._speed(decoder, prefiller)
            block_bytes = self._request.block_bytes
            all_ms = transfer_ms(to_move * block_bytes, gigabytes_per_s=speed)
            # Blocks move while the next chunk is computed: what is left at the end is the last chunk's, or more where
            # the link is slower than the prefill.
            last_blocks = min(to_move, -(-min(prefiller.chunk_tokens, self.prompt_tokens) // self.block_tokens))
            last_ms = transfer_ms(last_blocks * block_bytes, gigabytes_per_s=speed)
            transferring_ms = max(last_ms, all_ms - prefilling.compute_ms)
        parts = CostParts(
            queue_ms=prefilling.queue_ms,
            pull_ms=prefilling.pull_ms,
            compute_ms=prefilling.compute_ms,
            transfer_ms=transferring_ms,
            join_ms=decoding.join_ms,
            stream_ms=decoding.stream_ms,
            delay_ms=prefilling.delay_ms + decoding.delay_ms,
            recompute_ms=prefilling.recompute_ms + decoding.recompute_ms,
            hop_ms=REMOTE_MS,
        )
        keeps = not self._promises or self._keeps(parts.ttft_ms, decoding.tpot_ms)
        return RouteOption(decoder.worker_id, prefiller.worker_id, parts, decoding.tpot_ms, keeps)

    def prefill_ms(self, worker: WorkerView, leading_blocks: int) -> float:
        """The worker as P, whoever is D; one that breaks the promise of the first token comes after all others."""
        prefilling = self._prefilling(worker, leading_blocks)
        ttft_ms = REMOTE_MS + prefilling.queue_ms + prefilling.pull_ms + prefilling.compute_ms
        limit_ms = self._request.ttft_limit_ms
        broken_ms = BROKEN_MS if limit_ms is not None and ttft_ms > limit_ms else 0.0
        return broken_ms + ttft_ms + prefilling.delay_ms + prefilling.recompute_ms

    def _prefilling(self, worker: WorkerView, leading_blocks: int) -> _Prefilling:
        known = self._prefilling_of.get(worker.worker_id)
        if known is None:
            known = self._prefilling_of[worker.worker_id] = self._prefilling_with(worker, leading_blocks, None)
        return known

    def _prefilling_with(self, worker: WorkerView, leading_blocks: int, decoder: Holder | None) -> _Prefilling:
        cached = self.cached(leading_blocks)
        peers = self.peers(worker, leading_blocks, decoder)
        _, blocks, pull_ms = peers[0] if peers else (worker, cached, 0.0)
        compute_ms = self.compute_ms(worker, blocks)
        return _Prefilling(
            blocks,
            self.queue_ms(worker),
            pull_ms,
            compute_ms,
            self.prefill_delay_ms(worker, compute_ms),
            self.recompute_ms(worker, self.prompt_blocks - cached),
        )

    def peers(
        self, prefiller: WorkerView, leading_blocks: int, decoder: Holder | None = None
    ) -> list[tuple[WorkerView, int, float]]:
        """(holder, blocks it holds, ms to pull what `prefiller` lacks), most time saved first."""
        cached = self.cached(leading_blocks)
        candidates = [holder for holder in self._holders if self.cached(holder[1]) > cached]
        if decoder is not None and self.cached(decoder[1]) > cached and decoder not in candidates:
            candidates.append(decoder)
        if not candidates:
            return []
        compute_ms = self.compute_ms(prefiller, cached)
        found: list[tuple[float, int, tuple[WorkerView, int, float]]] = []
        for at, (holder, leading) in enumerate(candidates):
            if holder.worker_id == prefiller.worker_id:
                continue
            blocks = self.cached(leading)
            num_bytes = (blocks - cached) * self._request.block_bytes
            pull_ms = transfer_ms(num_bytes, gigabytes_per_s=self._speed(prefiller, holder))
            saved_ms = compute_ms - self.compute_ms(prefiller, blocks)
            if pull_ms < saved_ms * PULL_MARGIN:
                found.append((pull_ms - saved_ms, at, (holder, blocks, pull_ms)))
        return [peer for _, _, peer in sorted(found)[:PREFIX_PEERS]]

    # -- inside

    def _keeps(self, ttft_ms: float, tpot_ms: float) -> bool:
        request = self._request
        return (request.ttft_limit_ms is None or ttft_ms <= request.ttft_limit_ms) and (
            request.tpot_limit_ms is None or tpot_ms <= request.tpot_limit_ms
        )

    def _speed(self, reader: WorkerView, holder: WorkerView) -> float:
        measured = self._links.get((reader.worker_id, holder.worker_id), 0.0)
        return measured if measured > 0.0 else DEFAULT_LINK_GIGABYTES_PER_S
