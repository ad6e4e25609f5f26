"""What share of evicted blocks is wanted again, on recorded traffic, and how near `EvictionGhost` comes to it.

A trace's prompts meet one cache, least recently used first and leaves before their parents, of a size that is a share
of all distinct blocks. `returned` is counted over the whole replay; `estimate` is what the ghost says at its end.
Traces: JSON lines with `hash_ids`, one integer a block that stands for all blocks before it too (Mooncake's format).

    python -m benchmarks.index.reuse FILE...
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from antiphon_kvtransfer.ghost import EvictionGhost
from antiphon_kvtransfer.identity import BlockHash

POOLS = (0.05, 0.2, 0.5)


def prompts(path: Path) -> Iterator[list[BlockHash]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield [BlockHash(number.to_bytes(16, "little")) for number in json.loads(line)["hash_ids"]]


def replay(path: Path, pool_blocks: int) -> tuple[int, float, float]:
    """Blocks evicted, the share of them that was asked for again, the ghost's estimate at the end."""
    cache: OrderedDict[BlockHash, None] = OrderedDict()
    ghost = EvictionGhost()
    evicted = returned = 0
    for chain in prompts(path):
        held = next((at for at, block in enumerate(chain) if block not in cache), len(chain))
        returned += ghost.asked(chain, held)
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        gone = [cache.popitem(last=False)[0] for _ in range(len(cache) - pool_blocks)]
        ghost.evicted(gone)
        evicted += len(gone)
    return evicted, returned / evicted if evicted else 0.0, ghost.reuse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    print("| trace | distinct blocks | pool | evicted | returned | estimate |\n|---|---|---|---|---|---|")
    for path in parser.parse_args().traces:
        distinct = len({block for chain in prompts(path) for block in chain})
        for share in POOLS:
            evicted, returned, estimate = replay(path, int(distinct * share))
            name = path.name.partition(".")[0]
            print(f"| {name} | {distinct:,} | {share:.0%} | {evicted:,} | {returned:.3f} | {estimate:.3f} |")


if __name__ == "__main__":
    main()
