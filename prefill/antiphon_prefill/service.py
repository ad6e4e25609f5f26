"""The prefill role: computes prompts for decode workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import grpc
import grpc.aio
from antiphon_engine.interface import RequestRefused
from antiphon_proto import worker_pb2 as wire
from antiphon_proto.worker_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from antiphon_worker.channels import is_end
from antiphon_worker.service import WorkerContext, WorkerService
from antiphon_worker.wire import wire_refusal

from antiphon_prefill.run import PrefillRun, Stream

log = logging.getLogger("antiphon.prefill")


class PrefillService(WorkerService, PrefillServicer):
    """Serves `Prefill.Run` where the role is prefill or both. Each call is a coroutine of the gRPC server's."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._runs: set[asyncio.Task[object]] = set()
        self._served: set[PrefillRun] = set()
        """Of these, what the engine has taken."""
        self._idle = asyncio.Event()
        self._idle.set()

    def register(self, server: grpc.aio.Server) -> None:
        add_PrefillServicer_to_server(self, server)

    async def Run(self, request_iterator: object, context: Stream) -> None:  # type: ignore[override]  # noqa: N802
        task = asyncio.current_task()
        assert task is not None
        self._runs.add(task)
        self._idle.clear()
        try:
            # By themselves: grpc cannot end a call whose first message, with them inside, is still being written.
            await context.send_initial_metadata(())
            await self._serve(context)
        finally:
            self._runs.discard(task)
            if not self._runs:
                self._idle.set()

    async def _serve(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(self._context.lost_after_s):
                first = await stream.read()
        except TimeoutError:
            return
        if is_end(first) or not first.HasField("start"):
            await stream.write(_refused(wire.RefusalReason.REFUSAL_INVALID, "the first message must be RunStart"))
            return
        refusal = self._refusal(first.start)
        if refusal is not None:
            self._context.metrics.requests.labels("prefill", "refused").inc()
            await stream.write(refusal)
            return
        run = PrefillRun(self._context, stream, first.start)
        try:
            run.submit()
        except RequestRefused as refused:
            self._context.metrics.requests.labels("prefill", "refused").inc()
            await stream.write(_refused(wire_refusal(refused.reason), str(refused)))
            return
        self._served.add(run)
        try:
            ending = await run.serve()
            log.debug("run %s ended: %s", first.start.request_id, ending)
            # Only a caller that is still there hears it, and for that one the run did not end as it should.
            stream.set_code(grpc.StatusCode.ABORTED)
            stream.set_details(ending)
        finally:
            self._served.discard(run)
            self._context.metrics.requests.labels("prefill", "complete" if run.complete else "cancelled").inc()

    def _refusal(self, start: wire.RunStart) -> wire.RunDown | None:
        identity = self._context.identity
        if start.incarnation != identity.incarnation:
            return _refused(
                wire.RefusalReason.REFUSAL_WRONG_ROLE,
                f"{identity.worker_id} is incarnation {identity.incarnation}, not {start.incarnation}",
            )
        if not self._context.role.prefills:
            return _refused(wire.RefusalReason.REFUSAL_WRONG_ROLE, f"{identity.worker_id} is a decode worker")
        if self._context.drain.on:
            return _refused(wire.RefusalReason.REFUSAL_DRAINING, f"{identity.worker_id} is draining")
        return None

    @property
    def active_requests(self) -> int:
        return len(self._runs)

    async def drained(self) -> None:
        await self._idle.wait()

    def give_back(self, why: str) -> None:
        """Prompts that are not finished. What is finished stays to be pulled."""
        for run in self._served:
            run.give_back(why)

    def break_off(self, reason: str) -> None:
        """Callers hear it by the end of their calls, which the server's stop ends."""

    @property
    def open_tasks(self) -> int:
        return len(self._runs)

    def status(self) -> Mapping[str, object]:
        runs = len(self._runs)
        return {"prefill_runs": runs, "leaving_runs": 0 if self._context.role.prefills else runs}

    async def close(self) -> None:
        """The server's stop has ended all calls; wait for their clean-up."""
        for task in list(self._runs):
            task.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)


def _refused(reason: wire.RefusalReason.ValueType, message: str) -> wire.RunDown:
    return wire.RunDown(refused=wire.Refused(reason=reason, message=message))
