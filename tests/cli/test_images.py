"""Each image installs the extra of its command and nothing else: the command has to start with that."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORT_NAMES = {
    "huggingface_hub": "huggingface_hub",
    "kopf": "kopf",
    "aiohttp": "aiohttp",
    "pyyaml": "yaml",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "gguf": "gguf",
    "matplotlib": "matplotlib",
    "huggingface-hub": "huggingface_hub",
    "ray": "ray",
    "llguidance": "llguidance",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-health-checking": "grpc_health",
}
PROGRAM = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r} in this image")

MISSING = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Missing())
from antiphon.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def _names(extra: str) -> set[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {name for line in extras[extra] if (name := line.split("=")[0].split(">")[0].split("<")[0].strip())}
    return {IMPORT_NAMES[name] for name in found}


@pytest.mark.parametrize("extra", ["gateway", "operator", "worker", "simulate"])
def test_a_command_starts_with_its_own_extra_alone(extra: str) -> None:
    """A misspelt option is looked for in the options of all commands."""
    everything = set().union(*(_names(other) for other in ("gateway", "operator", "worker", "simulate")))
    missing = ",".join(sorted(everything - _names(extra)))
    words = [sys.executable, "-c", PROGRAM, missing, extra, "--no-such-option"]
    process = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert "No module named" not in process.stderr
    assert process.returncode == 2, process.stderr


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("gateway", "antiphon_gateway.server"),
        ("operator", "antiphon_operator.runtime.main"),
        ("simulate", "antiphon_simulate.command"),
    ],
)
def test_what_runs_in_an_image_imports_only_what_is_in_it(extra: str, module: str) -> None:
    everything = set().union(*(_names(other) for other in ("gateway", "operator", "worker", "simulate")))
    missing = ",".join(sorted(everything - _names(extra)))
    program = PROGRAM.replace("from antiphon.__main__ import main\nsys.exit(main(sys.argv[1:]))", f"import {module}")
    process = subprocess.run([sys.executable, "-c", program, missing], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
