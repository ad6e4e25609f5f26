"""gRPC channels to other workers, one for each process there, reused by every request.

A channel is known by worker, incarnation and address: a restarted worker gets a new channel, and none waits for the
reconnection back-off of a dead one. The least recently used are closed beyond a bound.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import grpc.aio
from antiphon_kvtransfer.links import PeerAddress

MAX_CHANNELS = 1024
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Model cards carry tokenizer files; long prompts have hundreds of kilobytes."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Channels of one process to one address otherwise share a connection and its back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)


def server_options(lost_after_ms: int) -> tuple[tuple[str, int], ...]:
    """Options of a worker's server.

    A gateway or peer that was given up for its silence may be frozen, or its host gone: then the end of its call never
    leaves, and call and connection would stay. Pings find that out, later than heartbeats do.
    """
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Two processes must never share a port by accident.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", 4 * lost_after_ms),
        ("grpc.keepalive_timeout_ms", 2 * lost_after_ms),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def is_end(message: object) -> bool:
    """Whether a `read` on a stream came back with its end and not with a message."""
    return message is grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs do not know it


class ChannelPool:
    """Owns the channels of one process."""

    def __init__(self) -> None:
        self._channels: OrderedDict[PeerAddress, grpc.aio.Channel] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def channel(self, peer: PeerAddress) -> grpc.aio.Channel:
        """The channel to `peer`; connects when first used."""
        channel = self._channels.get(peer)
        if channel is None:
            channel = grpc.aio.insecure_channel(peer.address, options=CHANNEL_OPTIONS)
            self._channels[peer] = channel
            if len(self._channels) > MAX_CHANNELS:
                _, oldest = self._channels.popitem(last=False)
                task = asyncio.get_running_loop().create_task(oldest.close(grace=None))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        else:
            self._channels.move_to_end(peer)
        return channel

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), OrderedDict()
        await asyncio.gather(*(channel.close(grace=None) for channel in channels), *self._closing)
