"""What a look-up and an insert of the block mirror are made of: the index of `run.py`, taken apart.

Times of parts are CPU times. Prints markdown.

    python -m benchmarks.index.parts
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from antiphon_kvtransfer.identity import BlockHash

from benchmarks.index import workload
from benchmarks.index.contestants import Ours

LOOK_UPS = 2_000


Chain = list[BlockHash]


class CountingDict(dict[BlockHash, int]):
    probes = 0

    def get(self, key: BlockHash, default: int = 0) -> int:  # type: ignore[override]
        CountingDict.probes += 1
        return super().get(key, default)


def main() -> None:
    ours = Ours()
    for phase in workload.PHASES:
        for event in workload.events(phase):
            ours.apply(ours.stored(event))
    model = ours.mirror._models["model"]
    print(
        "| held by | blocks | probes | first time, p50 us | again, p50 us | again, as groups |\n|---" + "|---" * 5 + "|"
    )
    for blocks in (64, 512):
        for case in workload.CASES:
            if case == "moving":  # Asked here without its changes it would be *steps*.
                continue
            draw = random.Random(f"{case} {blocks}")
            # Each name once: the second look-up of it finds hash values, dictionary and caches of the processor warm.
            asked = {q.packed: q for q in (workload.question(case, blocks, draw) for _ in range(LOOK_UPS // 4))}
            chains = [ours.chain(packed) for packed in asked]
            first = _each_us(chains, ours.ask)
            again = statistics.median(_each_us([chain], ours.ask, 5)[-1] for chain in chains[:200])
            groups = statistics.median(_each_us([chain], ours.ask_briefly, 5)[-1] for chain in chains[:200])
            plain = model.holders
            model.holders = CountingDict({block: plain[block] for chain in chains for block in chain if block in plain})
            CountingDict.probes = 0
            for chain in chains:
                ours.ask(chain)
            model.holders = plain
            # Of a case with one chain only, the first time is one sample: not shown.
            once = f"{statistics.median(first):.1f}" if len(chains) > 1 else "-"
            probes = CountingDict.probes / len(chains)
            print(f"| {case} | {blocks} | {probes:.0f} | {once} | {again:.1f} | {groups:.1f} |")
    print(f"\n| part | ns |\n|---|---|\n{_parts(ours)}")


def _each_us(
    chains: Sequence[Sequence[bytes]], ask: Callable[[Sequence[bytes]], object], times: int = 1
) -> list[float]:
    taken = []
    for _ in range(times):
        for chain in chains:
            started = time.perf_counter_ns()
            ask(chain)
            taken.append((time.perf_counter_ns() - started) / 1e3)
    return taken


def _parts(ours: Ours) -> str:
    model = ours.mirror._models["model"]
    get = model.holders.get
    workers = random.Random(2).sample(range(workload.WORKERS), 400)
    packed = [workload.chain(f"own-{worker}-0") for worker in workers]
    blocks = len(packed) * workload.CHAIN_BLOCKS
    rows: list[tuple[str, float]] = []

    def part(title: str, count: int, work: Callable[[], object]) -> None:
        started = time.process_time_ns()
        work()
        rows.append((title, (time.process_time_ns() - started) / count))

    cut: list[Chain] = []
    part("cut a hash out of a delta", blocks, lambda: cut.extend(ours.chain(each) for each in packed))
    flat = [block for chain in cut for block in chain]
    random.Random(3).shuffle(flat)
    part("hash value of a new bytes object, once", blocks, lambda: [hash(block) for block in flat])
    part("find a block among all, any order", blocks, lambda: [get(block, 0) for block in flat])
    near = flat[:500]
    part(
        "find a block, found just before",
        100 * len(near),
        lambda: [get(block, 0) for _ in range(100) for block in near],
    )
    few = {block: 0 for block in flat}
    part("put a block into a dictionary of no others", blocks, lambda: dict.fromkeys(few, 1))
    wide, other = (1 << workload.WORKERS) - 1, (1 << workload.WORKERS - 1) | 1
    part("AND of two masks of 1,000 workers", 100_000, lambda: [wide & other for _ in range(100_000)])
    everybody = tuple(f"worker-{number}" for number in range(workload.WORKERS))
    part("a dict of 1,000 workers", 200, lambda: [dict.fromkeys(everybody, 64) for _ in range(200)])
    return "\n".join(f"| {title} | {ns:,.0f} |" for title, ns in rows)


if __name__ == "__main__":
    main()
