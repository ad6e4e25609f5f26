"""Options: flag over variable over default, and mistakes that are told instead of ignored."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
from antiphon.__main__ import known_options
from antiphon.configuration import (
    ConfigurationError,
    add_arguments,
    check_environment,
    describe,
    load,
    specs,
    to_environment,
)
from antiphon_telemetry.options import option


@dataclass(frozen=True, slots=True)
class Sample:
    model: str = option("demo", "what to serve")
    port: int = option(8000, "where to listen")
    wait_s: float = option(1.5, "how long, 50% of the time")
    role: str = option("both", "what to do", choices=("prefill", "both"))
    quiet: bool = option(False, "say less")
    worker: tuple[str, ...] = option((), "host:port")
    redis_url: str = option("", "where Redis is", secret=True)

    def __post_init__(self) -> None:
        if self.port > 65535:
            raise ValueError("ports end at 65535")


def read(*arguments: str, **environment: str) -> Sample:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, specs(Sample), positional=("model",))
    return load(Sample, parser.parse_args(arguments), environment)


def test_defaults() -> None:
    assert read() == Sample()


def test_a_flag_wins_over_the_variable_and_the_variable_over_the_default() -> None:
    assert read(ANTIPHON_PORT="9").port == 9
    assert read("--port", "10", ANTIPHON_PORT="9").port == 10


def test_every_kind_of_value_from_flags_and_from_variables() -> None:
    expected = Sample("folder", 1, 2.5, "prefill", True, ("a:1", "b:2"), "redis://h")
    flags = "folder --port 1 --wait-s 2.5 --role prefill --quiet --worker a:1 --worker b:2 --redis-url redis://h"
    assert read(*flags.split()) == expected
    assert expected == read(
        ANTIPHON_MODEL="folder",
        ANTIPHON_PORT="1",
        ANTIPHON_WAIT_S="2.5",
        ANTIPHON_ROLE="prefill",
        ANTIPHON_QUIET="yes",
        ANTIPHON_WORKER="a:1, b:2",
        ANTIPHON_REDIS_URL="redis://h",
    )


def test_a_switch_can_be_turned_off_against_the_variable() -> None:
    assert read("--no-quiet", ANTIPHON_QUIET="true").quiet is False


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("--port", "many", "--port: 'many' is not a whole number"),
        ("--wait-s", "long", "--wait-s: 'long' is not a number"),
        ("--role", "cook", "--role: 'cook' is not one of prefill, both"),
    ],
)
def test_a_wrong_value_says_which_flag_and_what_is_accepted(flag: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(flag, value)
    assert str(caught.value) == complaint


def test_a_wrong_value_of_a_variable_names_the_variable() -> None:
    with pytest.raises(ConfigurationError, match="ANTIPHON_QUIET: 'maybe' is neither true nor false"):
        read(ANTIPHON_QUIET="maybe")


def test_what_the_record_itself_refuses_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="ports end at 65535"):
        read("--port", "70000")


def test_an_unknown_variable_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigurationError, match=r"ANTIPHON_PROT is not an option.*did you mean ANTIPHON_PORT\?"):
        check_environment({"ANTIPHON_PROT": "1"}, specs(Sample))


def test_variables_of_every_command_and_of_other_programs_are_accepted() -> None:
    environment = {spec.variable: "x" for spec in known_options()} | {"PATH": "/bin", "OTEL_SERVICE_NAME": "x"}
    check_environment(environment, known_options())


def test_the_links_that_kubernetes_sets_for_services_are_not_taken_for_options() -> None:
    """A service called `antiphon` puts these into every pod of its namespace."""
    links = {
        "ANTIPHON_SERVICE_HOST": "10.0.0.1",
        "ANTIPHON_SERVICE_PORT": "8000",
        "ANTIPHON_SERVICE_PORT_HTTP": "8000",
        "ANTIPHON_PORT": "tcp://10.0.0.1:8000",
        "ANTIPHON_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ANTIPHON_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ANTIPHON_GATEWAY_PORT": "tcp://10.0.0.1:8000",
    }
    check_environment(links, specs(Sample))
    assert read(**links).port == 8000


def test_the_environment_made_for_a_child_gives_it_the_same_options() -> None:
    original = Sample("folder", 1, 2.5, "prefill", True, ("a:1", "b:2"), "redis://u:p@h/0")
    assert read(**to_environment(original)) == original
    assert to_environment(Sample()) == {}


def test_secrets_are_not_described() -> None:
    text = describe(Sample(model="http://user:word@host/x", redis_url="redis://user:hidden@host"))
    assert "hidden@" not in text
    assert "word" not in text
    assert "redis_url=(hidden)" in text
    assert "port=8000" in text


def test_help_names_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "where to listen [ANTIPHON_PORT; default: 8000]" in shown
    assert "50% of the time" in shown


def test_an_option_that_several_commands_share_is_of_one_kind() -> None:
    kinds: dict[str, type] = {}
    for spec in known_options():
        assert kinds.setdefault(spec.variable, spec.kind) is spec.kind, spec.variable
