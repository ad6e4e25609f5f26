"""The tables of options in docs/configuration.md, made from the code. `make docs` writes them; a test compares them."""

from __future__ import annotations

from pathlib import Path

from antiphon.configuration import OptionSpec, specs
from antiphon.deployment import handed_on
from antiphon.options import ServeOptions
from antiphon_gateway.options import GatewayOptions
from antiphon_worker.options import WorkerOptions

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- options: written by `make docs` -->\n"
END = "<!-- end of options -->\n"


def tables() -> str:
    """Everything between BEGIN and END."""
    handed = ", ".join(f"`{spec.flag}`" for spec in sorted(handed_on(), key=lambda spec: spec.field))
    return "\n".join(
        [
            "\n### `antiphon serve`\n",
            _table(specs(ServeOptions)),
            f"It also takes, and hands on to its workers and its gateway: {handed}.\n",
            "### `antiphon worker`\n",
            _table(specs(WorkerOptions)),
            "### `antiphon gateway`\n",
            _table(specs(GatewayOptions)),
        ]
    )


def written(page: str) -> str:
    """The tables as they stand in `page`."""
    return page.split(BEGIN)[1].split(END)[0]


def _table(options: tuple[OptionSpec, ...]) -> str:
    lines = ["| option | variable | default | what it is |", "|---|---|---|---|"]
    for spec in options:
        name = "`MODEL`" if spec.field == "model" else f"`{spec.flag}`"
        choices = f" ({', '.join(spec.choices)})" if spec.choices else ""
        help = f"{spec.help}{choices}".replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {name} | `{spec.variable}` | {spec.show(spec.default)} | {help} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
