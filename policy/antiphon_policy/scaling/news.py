"""What one gateway tells of one Model for scaling, as it travels: the contract between gateways and whoever decides.

A gateway writes its newest `GatewayNews` every second or two while it knows the Model, also when nobody asked for
anything (an empty window with fresh news is a fact), and at once when a request comes for a Model that sleeps. Readers
take the news of all gateways together: requests and what waits in gateways are summed, what workers said of themselves
is the same from whichever gateway saw it last.

Times are Unix milliseconds of the gateway's clock: gateways and operators of one cluster agree on it to a second or
so, and nothing here depends on less.
"""

from __future__ import annotations

import msgspec

from antiphon_policy.latency import CHUNK_TOKENS, StepModel
from antiphon_policy.route_records import WorkerRole
from antiphon_policy.scaling.records import ArrivalCounts, RequestSample

NEWS_FORMAT = 1
"""Grows when an older reader would misread newer news. New optional fields do not count."""

MOST_NEWS_SAMPLES = 1000
"""Of one gateway; with more requests in the window each stands for several."""


class ScalingNewsError(Exception):
    """Bytes that are no news which this version can read. The message says whose."""


class WorkerNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker, as this gateway knows it now."""

    worker_id: str
    role: WorkerRole
    revision: str = ""
    said_ms: float = 0.0
    """When it last told its load. Of two gateways' words the later one counts."""
    step: StepModel | None = None
    """None: it never said how fast it computes."""
    hardware: str = ""
    chunk_tokens: int = CHUNK_TOKENS
    max_sequences: int = 0
    """0: not said."""
    block_tokens: int = 0
    total_blocks: int = 0
    empty_blocks: int = 0
    waiting_tokens: int = 0
    """Prompt tokens that it accepted and has not computed, of all gateways."""
    running: int = 0
    """Answers that it decodes, of all gateways."""
    kv_tokens: int = 0
    draining: bool = False
    hit_tokens: int = 0
    """Prompt tokens that requests of this gateway's window did not have to compute because this worker held them."""


class PoolNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """What waits in this gateway's own line for workers of one role; not yet with any worker."""

    role: WorkerRole
    queued_requests: int = 0
    queued_tokens: int = 0
    """Prompt tokens, as far as is known uncached ones."""


class GatewayNews(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module's docstring."""

    gateway_id: str
    model: str
    """The Model's key."""
    at_ms: float
    format: int = NEWS_FORMAT
    window_s: float = 300.0
    """How far back the samples go (the gateway may be younger: `since_ms`)."""
    since_ms: float = 0.0
    """When this gateway began to count for this Model."""
    samples: tuple[RequestSample, ...] = ()
    """Requests that came in the window, oldest first; `MOST_NEWS_SAMPLES` at most. One that has not ended yet is there
    with the length that is expected of it."""
    arrivals: ArrivalCounts = ArrivalCounts()
    """Of the window only (whoever decides keeps the longer past); buckets end at multiples of `bucket_ms`."""
    pools: tuple[PoolNews, ...] = ()
    workers: tuple[WorkerNews, ...] = ()
    held_requests: int = 0
    """Requests that wait for the first worker of a Model that sleeps or starts: not in `pools`, not in `samples`."""
    held_tokens: int = 0
    """Of those, about how many prompt tokens (their text is not tokenised yet)."""
    streams: int = 0
    """Answers that are being sent now."""


def encode_news(news: GatewayNews) -> bytes:
    """JSON, so that a person at a Redis prompt can read it."""
    return msgspec.json.encode(news)


def decode_news(raw: bytes, gateway_id: str) -> GatewayNews:
    """Raises ScalingNewsError. Fields that this version does not know are ignored."""
    try:
        news = msgspec.json.decode(raw, type=GatewayNews)
    except msgspec.MsgspecError as error:
        raise ScalingNewsError(f"the news of gateway {gateway_id!r} is not readable ({error})") from error
    if news.format > NEWS_FORMAT:
        raise ScalingNewsError(
            f"the news of gateway {gateway_id!r} has format {news.format}, and this version reads up to {NEWS_FORMAT}:"
            " update whoever reads it before the gateways"
        )
    return news
