"""Loopback addresses for pods: all of 127.0.0.0/8 is this machine, so each pod can have one and use any port on it.

An address is taken by holding a socket bound to one port of it, so that test runs beside each other never share one;
and none is given twice by the same allocator, so what a dead pod left in the kernel meets nobody.
"""

from __future__ import annotations

import random
import socket

GUARD_PORT = 30999
"""Below the ports that the kernel gives to clients."""
TRIES = 1000


class Addresses:
    def __init__(self) -> None:
        self._guards: dict[str, socket.socket] = {}
        self._given: set[str] = set()

    def take(self) -> str:
        """Raises RuntimeError where no address can be bound, as where loopback is a single address."""
        for _ in range(TRIES):
            address = ".".join(("127", *(str(random.randint(1, 254)) for _ in range(3))))
            if address in self._given:
                continue
            guard = socket.socket()
            try:
                guard.bind((address, GUARD_PORT))
            except OSError:
                guard.close()
                continue
            self._given.add(address)
            self._guards[address] = guard
            return address
        raise RuntimeError("no free address in 127.0.0.0/8: pods as processes need Linux's whole loopback network")

    def give_back(self, address: str) -> None:
        self._guards.pop(address).close()
