"""From the options that packages declare to flags, environment variables and one checked record.

Packages declare options as dataclass fields (`antiphon_telemetry.options.option`); nothing else in the house parses
arguments. A field `some_name` is the flag `--some-name` and the variable `ANTIPHON_SOME_NAME`; a flag wins over the
variable, the variable over the default. All of them share one name space: a variable that any command knows is
accepted by every command, and an `ANTIPHON_*` variable that none knows is an error, because a misspelt option that is
silently ignored costs more than a start that is refused.

What may fail: a value of the wrong kind or an unknown name, both as ConfigurationError, whose message says which flag
or variable, what was wrong, and what is accepted.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from antiphon_telemetry.logs import hide_credentials

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX = "ANTIPHON_"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

# Kubernetes gives every pod variables about the services of its namespace. One named `antiphon` or `antiphon-gateway`
# would otherwise be taken for options, and ANTIPHON_PORT=tcp://... for a port.
_SERVICE_LINK_NAME = re.compile(r"_SERVICE_(HOST|PORT(_.+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_LINK_VALUE = re.compile(r"^(tcp|udp|sctp)://")

Options = TypeVar("Options", bound="DataclassInstance")


class ConfigurationError(ValueError):
    """An option that cannot be followed. The message is for the person who gave it."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptionSpec:
    """One option as its package declared it."""

    field: str
    kind: type
    """str, int, float, bool, or tuple (of str)."""
    default: Any
    help: str
    choices: tuple[str, ...]
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.field.upper()

    def parse(self, text: str, source: str) -> Any:
        """The value that `text` (from `source`, a flag or a variable) stands for. Raises ConfigurationError."""
        if self.kind is tuple:
            return tuple(item.strip() for item in text.split(",") if item.strip())
        if self.kind is bool:
            word = text.strip().lower()
            if word in _TRUE or word in _FALSE:
                return word in _TRUE
            raise ConfigurationError(f"{source}: {self._shown(text)} is neither true nor false")
        if self.kind in (int, float):
            try:
                return self.kind(text.strip())
            except ValueError:
                noun = "a whole number" if self.kind is int else "a number"
                raise ConfigurationError(f"{source}: {self._shown(text)} is not {noun}") from None
        if self.choices and text not in self.choices:
            raise ConfigurationError(f"{source}: {self._shown(text)} is not one of {', '.join(self.choices)}")
        return text

    def render(self, value: Any) -> str:
        """`value` as the environment variable would say it: `parse` undoes it."""
        if self.kind is tuple:
            return ",".join(value)
        if self.kind is bool:
            return "true" if value else "false"
        return str(value)

    def show(self, value: Any) -> str:
        """`value` for a log or a help text: no secrets."""
        if self.secret and value:
            return "(hidden)"
        return hide_credentials(self.render(value)) or "(none)"

    def _shown(self, text: str) -> str:
        return "the value" if self.secret else repr(hide_credentials(text))


def specs(options: type[DataclassInstance]) -> tuple[OptionSpec, ...]:
    """The options that a dataclass declares, in its order."""
    found = []
    for field in dataclasses.fields(options):
        if "help" not in field.metadata:
            continue
        kind = type(field.default)
        if kind not in (str, int, float, bool, tuple):
            raise TypeError(f"{options.__name__}.{field.name}: an option cannot have a default of type {kind.__name__}")
        found.append(
            OptionSpec(
                field=field.name,
                kind=kind,
                default=field.default,
                help=field.metadata["help"],
                choices=field.metadata["choices"],
                secret=field.metadata["secret"],
            )
        )
    return tuple(found)


def add_arguments(
    parser: argparse.ArgumentParser, options: Sequence[OptionSpec], *, positional: Sequence[str] = ()
) -> None:
    """Give `parser` a flag for every option; those named in `positional` have none, and may be left out.

    The parser only collects words; `load` gives them meaning, so that flags and variables are checked by one rule.
    """
    for spec in options:
        help = f"{spec.help} [{spec.variable}; default: {spec.show(spec.default)}]".replace("%", "%%")
        if spec.field in positional:
            parser.add_argument(spec.field, nargs="?", default=None, help=help, metavar=spec.field.upper())
        elif spec.kind is bool:
            parser.add_argument(spec.flag, action=argparse.BooleanOptionalAction, default=None, help=help)
        elif spec.kind is tuple:
            parser.add_argument(spec.flag, action="append", default=None, help=help, metavar="TEXT")
        else:
            metavar = "|".join(spec.choices) if spec.choices else {int: "N", float: "X", str: "TEXT"}[spec.kind]
            parser.add_argument(spec.flag, default=None, help=help, metavar=metavar)


def values(
    options: Sequence[OptionSpec], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The value of every option, by field: its flag's, else its variable's, else its default.

    Raises ConfigurationError.
    """
    result: dict[str, Any] = {}
    for spec in options:
        given = getattr(arguments, spec.field, None)
        if isinstance(given, bool):
            result[spec.field] = given
        elif isinstance(given, list):
            result[spec.field] = tuple(given)
        elif given is not None:
            result[spec.field] = spec.parse(given, spec.flag)
        elif spec.variable in environment and not _service_link(spec.variable, environment[spec.variable]):
            result[spec.field] = spec.parse(environment[spec.variable], spec.variable)
        else:
            result[spec.field] = spec.default
    return result


def load(options: type[Options], arguments: argparse.Namespace, environment: Mapping[str, str]) -> Options:
    """The options record of one command. Raises ConfigurationError."""
    given = values(specs(options), arguments, environment)
    try:
        return options(**given)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def check_environment(environment: Mapping[str, str], known: Iterable[OptionSpec]) -> None:
    """Raise ConfigurationError if an `ANTIPHON_*` variable is none of `known`."""
    names = sorted({spec.variable for spec in known})
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in names or _service_link(name, environment[name]):
            continue
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else "; `antiphon COMMAND --help` lists the variables there are"
        raise ConfigurationError(f"the environment variable {name} is not an option of Antiphon{hint}")


def to_environment(options: DataclassInstance) -> dict[str, str]:
    """The variables that make `load` give an equal record: what a parent hands to a child process."""
    return {
        spec.variable: spec.render(getattr(options, spec.field))
        for spec in specs(type(options))
        if getattr(options, spec.field) != spec.default
    }


def describe(options: DataclassInstance) -> str:
    """The effective configuration in one line, without secrets."""
    return " ".join(f"{spec.field}={spec.show(getattr(options, spec.field))}" for spec in specs(type(options)))


def _service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK_NAME.search(name) or (name.endswith("_PORT") and _SERVICE_LINK_VALUE.match(value)))
