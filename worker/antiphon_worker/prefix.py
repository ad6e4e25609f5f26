"""Fetch a prefix from a peer that holds more of it than we do, before the rest is computed here.

Used by whoever prefills: a prefill worker at the start of a run, a decode worker that prefills by itself. All of it is
an attempt: whatever goes wrong or takes too long, the engine computes what is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from antiphon_kvtransfer.links import LinkError, PeerLink
from antiphon_proto.worker_pb2 import PrefixPeer

from antiphon_worker.held import BlockPuller, HeldBlocks
from antiphon_worker.service import WorkerContext
from antiphon_worker.wire import peer_address

log = logging.getLogger("antiphon.kv")

PREFIX_DEADLINE_S = 5.0
PULL_BLOCKS = 256
"""Blocks of one pull: what has arrived by then counts, whatever becomes of the rest."""


async def pull_prefix(context: WorkerContext, held: HeldBlocks, peers: Sequence[PrefixPeer]) -> bool:
    """Pull and publish as much of the held request's prefix as one of `peers` has beyond our own.

    Returns in any case within about PREFIX_DEADLINE_S. False: a read was given up that may still write into the
    reserved blocks, so nobody else may be asked for what is missing. Raises KeyError if the request is gone.
    """
    puller = BlockPuller(held, context.metrics, context.engine.info.kv_block_bytes)
    try:
        async with asyncio.timeout(PREFIX_DEADLINE_S):
            for prefix_peer in peers:
                if prefix_peer.peer.worker_id == context.identity.worker_id:
                    continue
                # A whole prompt in cache still needs its last token computed: the engine sees to that.
                wanted = min(prefix_peer.blocks, held.full_blocks)
                if wanted <= held.leading:
                    continue
                if not await context.bridge.room(partial(held.reserve, wanted), PREFIX_DEADLINE_S):
                    return True
                try:
                    link = await context.links.link(peer_address(prefix_peer.peer), context.lost_after_s)
                except LinkError as error:
                    log.warning("no prefix from %s: %s", prefix_peer.peer.worker_id, error)
                    continue
                try:
                    if await _pull_from(link, held, puller, wanted):
                        return True
                except LinkError as error:
                    log.warning("the prefix from %s did not arrive: %s", prefix_peer.peer.worker_id, error)
                    return False
    except TimeoutError:
        log.warning("a prefix did not arrive from its peers within %.0f s; it is computed here", PREFIX_DEADLINE_S)
        return False
    return True


async def _pull_from(link: PeerLink, held: HeldBlocks, puller: BlockPuller, wanted: int) -> bool:
    """Whether all of the leading `wanted` blocks came. Raises LinkError."""
    while (stretch := held.missing(held.leading, min(wanted, held.leading + PULL_BLOCKS))) is not None:
        begin, end = stretch
        if await puller.pull(link, begin, end) < end - begin:
            return False
    return True
