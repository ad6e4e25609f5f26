"""The real kubectl, as it is, and a double in a process of its own for it to talk to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
KUBECTL = Path(sys.executable).with_name("kubectl")
DEADLINE_S = 30


@dataclass(frozen=True, slots=True)
class Kubectl:
    """`home` has the kubeconfig, `config`."""

    home: Path

    def __call__(self, *arguments: str, text: str = "", code: int = 0) -> str:
        """What it says, on either stream. `text` is its standard input; it has to end with `code`."""
        environment = {"KUBECONFIG": str(self.home / "config"), "HOME": str(self.home), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [str(KUBECTL), *arguments],
            input=text,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == code, done.stdout
        return done.stdout


@contextlib.contextmanager
def kubectl_on_a_double(home: Path, manifests: Iterable[Path]) -> Iterator[Kubectl]:
    """With a double that has these manifests."""
    command = [sys.executable, "-m", "tests.support.kube", "--kubeconfig", str(home / "config"), *map(str, manifests)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("serving at http://127.0.0.1:"), first + process.stdout.read()
        yield Kubectl(home)
    finally:
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
