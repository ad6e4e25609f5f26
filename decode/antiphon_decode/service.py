"""The decode role: takes requests from gateways and answers them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import grpc.aio
from antiphon_engine.interface import RequestRefused
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import add_WorkerServicer_to_server
from antiphon_worker.attach import AttachServicer, LiveRequest, RequestSink
from antiphon_worker.card import model_card
from antiphon_worker.detokenize import special_token_ids
from antiphon_worker.service import TaskOwner, WorkerContext, WorkerService
from antiphon_worker.wire import wire_refusal

from antiphon_decode.request import DecodeRequest

log = logging.getLogger("antiphon.decode")


class DecodeService(WorkerService):
    """Serves Attach on every worker, and the requests that come by it where the role is decode or both."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._special_token_ids = special_token_ids(context.tokenizer)
        self._requests: set[DecodeRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = TaskOwner()
        self._last_unpulled_at_done: int | None = None
        self._leaving: asyncio.TimerHandle | None = None
        """When answers of a role that the worker has left go on elsewhere."""
        self._attach = AttachServicer(context, self, model_card(context.engine.info))
        context.role.on_change.append(self._role_changed)

    def register(self, server: grpc.aio.Server) -> None:
        add_WorkerServicer_to_server(self._attach, server)

    def submit(self, submit: wire.Submit, sink: RequestSink) -> LiveRequest | None:
        """Take or refuse a request at once (`SubmitHandler`)."""
        context = self._context
        if not context.role.decodes:
            sink.refused(wire.RefusalReason.REFUSAL_WRONG_ROLE, f"{context.identity.worker_id} is a prefill worker")
            return None
        if context.drain.on:
            sink.refused(wire.RefusalReason.REFUSAL_DRAINING, f"{context.identity.worker_id} is draining")
            return None
        try:
            request = DecodeRequest(context, submit, sink, self._special_token_ids, self._tasks, self._ended)
        except RequestRefused as refusal:
            sink.refused(wire_refusal(refusal.reason), str(refusal))
            return None
        if not request.start():
            return None
        self._requests.add(request)
        self._idle.clear()
        return request

    def _role_changed(self) -> None:
        """Answers that run go on; what has not ended after the time of a drain goes on at another worker."""
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        if self._requests and not self._context.role.decodes:
            loop = asyncio.get_running_loop()
            self._leaving = loop.call_later(self._context.options.drain_timeout_s, self._leave)

    def _leave(self) -> None:
        self._leaving = None
        self.give_back(f"{self._context.identity.worker_id} became a prefill worker")

    def _ended(self, request: DecodeRequest) -> None:
        self._requests.discard(request)
        if request.unpulled_at_done is not None:
            self._last_unpulled_at_done = request.unpulled_at_done
        if not self._requests:
            self._idle.set()

    @property
    def active_requests(self) -> int:
        return len(self._requests)

    async def drained(self) -> None:
        await self._idle.wait()

    def give_back(self, why: str) -> None:
        if self._requests:
            log.info("%d answers go on elsewhere: %s", len(self._requests), why)
        for request in list(self._requests):
            request.give_up(why)

    def break_off(self, reason: str) -> None:
        self._attach.break_off(reason)

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def status(self) -> Mapping[str, object]:
        return {
            "gateways": self._attach.gateways,
            "unpulled_at_done": self._last_unpulled_at_done,
            "leaving_answers": 0 if self._context.role.decodes else len(self._requests),
        }

    async def close(self) -> None:
        if self._leaving is not None:
            self._leaving.cancel()
        for request in list(self._requests):
            request.cancel()
        await self._tasks.close()
