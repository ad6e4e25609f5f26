"""Tables of options, metrics and parameters in docs/, made from the code. `make docs` writes, a test compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from antiphon.configuration import OptionSpec, specs
from antiphon.deployment import handed_on
from antiphon.options import ServeOptions
from antiphon_engine import Load
from antiphon_engine.executor import RankTimes
from antiphon_gateway.metrics import GatewayMetrics
from antiphon_gateway.options import GatewayOptions
from antiphon_operator.kube.metrics import API_REQUESTS
from antiphon_operator.options import OperatorOptions
from antiphon_operator.runtime.metrics import OperatorMetrics
from antiphon_policy.latency import StepModelFit
from antiphon_worker.metrics import WorkerMetrics
from antiphon_worker.options import WorkerOptions
from prometheus_client import CollectorRegistry

from tests.support.other_servers import api_tables

DOCS = Path(__file__).parents[2] / "docs"
BEGIN = "<!-- tables: written by `make docs` -->\n"
END = "<!-- end of tables -->\n"


@dataclass(frozen=True, slots=True)
class Page:
    """A page with tables between BEGIN and END."""

    path: Path
    tables: Callable[[], str]

    def written(self) -> str:
        """The tables as they stand in the page."""
        return self.path.read_text().split(BEGIN)[1].split(END)[0]

    def write(self) -> None:
        before, rest = self.path.read_text().split(BEGIN)
        self.path.write_text(before + BEGIN + self.tables() + END + rest.split(END)[1])


def option_tables() -> str:
    handed = ", ".join(f"`{spec.flag}`" for spec in sorted(handed_on(), key=lambda spec: spec.field))
    return "\n".join(
        [
            "\n### `antiphon serve`\n",
            _option_table(specs(ServeOptions)),
            f"It also takes, and hands on to its workers and its gateway: {handed}.\n",
            "### `antiphon worker`\n",
            _option_table(specs(WorkerOptions)),
            "### `antiphon gateway`\n",
            _option_table(specs(GatewayOptions)),
            "### `antiphon operator`\n",
            _option_table(specs(OperatorOptions)),
        ]
    )


def metric_tables() -> str:
    gateway = GatewayMetrics()
    registry = CollectorRegistry()
    worker = WorkerMetrics(registry)
    load = Load(*[0] * len(Load.__dataclass_fields__))
    worker.watch(lambda: load, lambda: (), rank_times=lambda: RankTimes(0.0, 0.0))
    worker.watch_predictions(StepModelFit())
    return "\n".join(
        [
            "\n### Gateway\n",
            _metric_table(gateway.registry),
            "### Worker\n",
            _metric_table(registry),
            "### Operator\n",
            _metric_table(_operator_registry()),
        ]
    )


def _operator_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    OperatorMetrics(registry)
    registry.register(API_REQUESTS)
    return registry


def _option_table(options: tuple[OptionSpec, ...]) -> str:
    lines = ["| option | variable | default | what it is |", "|---|---|---|---|"]
    for spec in options:
        name = "`MODEL`" if spec.field == "model" else f"`{spec.flag}`"
        choices = f" ({', '.join(spec.choices)})" if spec.choices else ""
        help = f"{spec.help}{choices}".replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {name} | `{spec.variable}` | {spec.show(spec.default)} | {help} |")
    return "\n".join(lines) + "\n"


def _metric_table(registry: CollectorRegistry) -> str:
    lines = ["| metric | kind | what it is |", "|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda family: family.name):
        if family.name.startswith("antiphon_"):
            suffix = "_total" if family.type == "counter" else ""
            lines.append(f"| `{family.name}{suffix}` | {family.type} | {family.documentation} |")
    return "\n".join(lines) + "\n"


PAGES = (
    Page(DOCS / "configuration.md", option_tables),
    Page(DOCS / "operations.md", metric_tables),
    Page(DOCS / "api.md", api_tables),
)


def main() -> None:
    for page in PAGES:
        page.write()


if __name__ == "__main__":
    main()
