"""GPUs: how much memory each has, and how many of them stand in how many nodes.

Sizes are those of the makers' data sheets, read as GB = 10^9 bytes. That is on the safe side: what drivers show is a
little more (an H100 of "80 GB" shows 81,559 MiB = 85.5 * 10^9 bytes, a B200 of "180 GB" 178.4 GiB = 191.5 * 10^9),
because memory chips come in powers of two. Who knows the exact size gives it as `--gpu-memory-gb`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GB = 10**9

_GPUS = re.compile(r"^\s*(?:(\d+)\s*[xX*]\s*)?([A-Za-z][A-Za-z0-9 _.\-]*?)\s*$")
_DEFAULT_PER_NODE = 8


class DeviceRefused(ValueError):
    """It is no set of GPUs. The message says why, and what can be written."""


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of GPU."""

    name: str
    memory_bytes: int
    source: str
    """Where the size is from."""


def _nvidia(name: str, memory_gb: int, page: str) -> Device:
    return Device(name, memory_gb * GB, f"NVIDIA data sheet {page}: {memory_gb} GB")


def _amd(name: str, memory_gb: int) -> Device:
    return Device(name, memory_gb * GB, f"AMD Instinct {name} data sheet: {memory_gb} GB")


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _nvidia("A10", 24, "A10 Tensor Core GPU"),
        _nvidia("A30", 24, "A30 Tensor Core GPU"),
        _nvidia("A40", 48, "A40"),
        _nvidia("A100-40GB", 40, "A100 Tensor Core GPU"),
        _nvidia("A100-80GB", 80, "A100 Tensor Core GPU"),
        _nvidia("L4", 24, "L4 Tensor Core GPU"),
        _nvidia("L40S", 48, "L40S"),
        _nvidia("RTX6000Ada", 48, "RTX 6000 Ada Generation"),
        _nvidia("H20", 96, "H20"),
        _nvidia("H100", 80, "H100 Tensor Core GPU (SXM)"),
        _nvidia("H100-NVL", 94, "H100 Tensor Core GPU (NVL)"),
        _nvidia("H200", 141, "H200 Tensor Core GPU"),
        _nvidia("B200", 180, "DGX B200 (1,440 GB in eight)"),
        _amd("MI250X", 128),
        _amd("MI300X", 192),
        _amd("MI325X", 256),
    )
}
"""By name. All of them compute in bfloat16."""

_ALSO = {"A100": "A100-80GB", "H100-80GB": "H100", "H200-141GB": "H200", "B200-180GB": "B200"}
"""Other names that people use; where a name stands for two sizes, the more common one of servers."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal GPUs in nodes. All nodes but the last are full."""

    device: Device
    gpus: int
    gpus_per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def largest_node(self) -> int:
        return min(self.gpus, self.gpus_per_node)

    def stages(self, tensor: int) -> int:
        """How many groups of `tensor` GPUs there are, each within one node."""
        full, rest = divmod(self.gpus, self.gpus_per_node)
        return full * (self.gpus_per_node // tensor) + rest // tensor


def read_fleet(text: str, *, gpus_per_node: int = 0, memory_gb: float = 0.0) -> Fleet:
    """`8xH200`, `H200` (one). With `memory_gb` the name may be any. `gpus_per_node` 0: eight. Raises DeviceRefused."""
    match = _GPUS.match(text)
    if match is None:
        raise DeviceRefused(f"--gpus {text!r}: write a number and a name, such as 8xH200")
    gpus, name = int(match[1] or 1), match[2]
    if gpus < 1:
        raise DeviceRefused(f"--gpus {text!r}: there has to be at least one")
    if gpus_per_node < 0:
        raise DeviceRefused(f"--gpus-per-node {gpus_per_node}: it has to be 1 or more")
    device = _device(name, memory_gb)
    return Fleet(device, gpus, gpus_per_node or _DEFAULT_PER_NODE)


def _device(name: str, memory_gb: float) -> Device:
    if memory_gb < 0:
        raise DeviceRefused(f"--gpu-memory-gb {memory_gb:g}: it has to be more than 0")
    if memory_gb:
        return Device(name, round(memory_gb * GB), "--gpu-memory-gb")
    wanted = _plain(name)
    by_name = {_plain(known): device for known, device in DEVICES.items()}
    by_name |= {_plain(other): DEVICES[known] for other, known in _ALSO.items()}
    if wanted not in by_name:
        raise DeviceRefused(
            f"--gpus: {name} is not a known GPU: use one of {', '.join(DEVICES)}, or say --gpu-memory-gb"
        )
    return by_name[wanted]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
