"""The rules of the house: who may import whom, what is generated is current, documents say what the code says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import other_servers, reference_tables

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["importlinter"]["root_packages"]


def run(*command: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANTIPHON_")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_each_package_imports_only_what_is_below_it() -> None:
    done = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import antiphon_gateway",
        "from antiphon.__main__ import run; run(['gateway', '--help'], {})",
        "from antiphon.__main__ import run; run(['serve', '--help'], {})",
        "from antiphon.__main__ import run; run(['--help'], {})",
        "import antiphon.serve",
        "import antiphon_policy, antiphon_telemetry, antiphon_proto",
    ],
)
def test_no_torch_where_no_model_runs(code: str) -> None:
    done = run(sys.executable, "-c", f"import sys\n{code}\nassert 'torch' not in sys.modules\nprint('light')")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("light\n")


def test_generated_protobuf_code_is_current(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto" / "antiphon_proto").glob("*.proto"))
    done = run(sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *outputs, *sources)
    assert done.returncode == 0, done.stderr
    generated = sorted((tmp_path / "antiphon_proto").iterdir())
    assert len(generated) == 4 * len(sources) == 8
    for file in generated:
        assert file.read_text() == (ROOT / "proto" / "antiphon_proto" / file.name).read_text(), (
            f"run `make proto`: {file}"
        )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_it_is_and_what_it_exports_exists(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__doc__
    assert package.__doc__.strip()
    assert package.__file__ is not None
    assert (Path(package.__file__).parent / "py.typed").is_file()
    for public in getattr(package, "__all__", ()):
        assert hasattr(package, public), f"{name}.{public}"


def test_every_module_tells_its_story() -> None:
    roots = [ROOT / folder for folder in PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]]
    silent = [
        str(file.relative_to(ROOT))
        for root in roots
        for file in root.rglob("*.py")
        if not file.name.endswith(("_pb2.py", "_pb2_grpc.py")) and not file.read_text().startswith(('"""', 'r"""'))
    ]
    assert silent == []


def test_every_package_is_installed_typed_and_checked() -> None:
    folders = PROJECT["tool"]["setuptools"]["packages"]["find"]["where"]
    found = {path.parent.name for folder in folders for path in (ROOT / folder).glob("*/__init__.py")}
    assert found == set(PACKAGES)
    assert found - {"antiphon_proto"} == set(PROJECT["tool"]["mypy"]["packages"])


@pytest.mark.parametrize("page", reference_tables.PAGES, ids=lambda page: page.path.name)
def test_the_documented_options_and_metrics_are_the_codes(page: reference_tables.Page) -> None:
    assert page.written() == page.tables(), "run `make docs`"


def test_every_parameter_of_openai_and_vllm_is_in_the_table() -> None:
    assert other_servers.unlisted() == set(), "each needs a row in antiphon_gateway.parameters"


def test_the_command_is_installed() -> None:
    done = run(str(Path(sys.executable).with_name("antiphon")), "version")
    assert done.stdout == f"antiphon {PROJECT['project']['version']}\n", done.stderr
