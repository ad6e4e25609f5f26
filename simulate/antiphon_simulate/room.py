"""Who gets blocks of a worker's pool, in what order: whoever asks first. So nobody starves, however much it needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from antiphon_simulate.job import Job
from antiphon_simulate.pool import BlockPool


class Room:
    """One worker's pool and the row of jobs that wait for room in it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._row: deque[Job] = deque()

    def __bool__(self) -> bool:
        """Somebody waits."""
        return bool(self._row)

    def find(self, job: Job) -> bool:
        """All the room that the job will need here. False: it stands in the row; ask again when its turn may have come.

        For its prompt on the worker that computes only that, else for prompt and answer.
        """
        row = self._row
        if (not row or job is row[0]) and self._hold(job):
            if row:
                row.popleft()
                job.waits_for_room = False
            return True
        if not job.waits_for_room:
            job.waits_for_room = True
            row.append(job)
        return False

    def find_for_answers(self) -> Iterator[Job]:
        """Some became free: those who were waiting to answer here, have room now and can have their prompts computed.

        A prompt finds its room itself, when its first chunk is planned.
        """
        row = self._row
        while row and row[0].prompt_on.room is not self:
            job = row[0]
            if not self.find(job):
                return
            yield job

    def _hold(self, job: Job) -> bool:
        if job.answer_on.room is not self:
            job.prompt_room = self.pool.hold(job.chain, job.prompt_blocks)
            return job.prompt_room is not None
        job.answer_room = self.pool.hold(job.chain, job.answer_blocks)
        if job.answer_room is None:
            return False
        if job.is_local:
            job.prompt_room = job.answer_room
        else:
            job.sent_blocks = job.answer_room.named
        return True
