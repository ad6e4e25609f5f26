"""Times and quantities: read exactly, one normal form each, and refused with a sentence."""

from __future__ import annotations

from fractions import Fraction

import pytest
from antiphon_operator.resource.base import DURATION, QUANTITY
from antiphon_operator.resource.durations import (
    DurationError,
    format_duration,
    is_duration,
    parse_duration_ms,
    parse_duration_s,
)
from antiphon_operator.resource.quantities import (
    QuantityError,
    is_quantity,
    normal_quantity,
    parse_quantity,
    quantity_bytes,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support import crds

UNITS = ("m", "", "k", "M", "G", "T", "P", "Ki", "Mi", "Gi", "Ti", "Pi")

IS_TIME = f"self != '' && self.matches('{DURATION}')"
SAME_TIME = "duration(self[0]) == duration(self[1])"
IS_QUANTITY = "self.matches('{}')".format(QUANTITY.replace("\\", "\\\\"))


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Once, and not within a generated case: the compiler moves the recursion limit."""
    crds.evaluate(IS_TIME, "")
    crds.evaluate(SAME_TIME, ["1s", "1s"])
    crds.evaluate(IS_QUANTITY, "")


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("500ms", 500), ("90s", 90_000), ("15m", 900_000), ("1h30m", 5_400_000), ("1m500ms", 60_500), ("0s", 0)],
)
def test_times_as_people_write_them(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds
    assert parse_duration_s(text) == milliseconds / 1000


@pytest.mark.parametrize("text", ["", "5", "s", "1.5s", "1 h", "30m1h", "1h1h", "-1s", "1d", "500ms\n", "½h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    assert not is_duration(text)
    with pytest.raises(DurationError, match="write one such as 500ms, 90s, 15m or 1h30m"):
        parse_duration_ms(text)


@given(st.integers(0, 10**12))
def test_a_time_in_its_normal_form_is_the_same_time(milliseconds: int) -> None:
    text = format_duration(milliseconds)
    assert parse_duration_ms(text) == milliseconds
    assert format_duration(parse_duration_ms(text)) == text


def test_no_time_is_below_zero() -> None:
    with pytest.raises(ValueError, match="never below zero"):
        format_duration(-1)


@given(st.from_regex(DURATION, fullmatch=True) | st.text("0123456789hms", max_size=8))
def test_the_api_server_reads_times_as_the_operator_does(text: str) -> None:
    assert crds.evaluate(IS_TIME, text) == is_duration(text)


@given(st.integers(1, 999_999), st.integers(1, 999_999_999))
def test_the_api_server_takes_times_for_the_same_length(minutes: int, milliseconds: int) -> None:
    text = f"{minutes}m{milliseconds}ms"
    assert crds.evaluate(SAME_TIME, [text, f"{parse_duration_ms(text)}ms"])


@pytest.mark.parametrize(
    ("text", "exact"),
    [("1", 1), ("500m", Fraction(1, 2)), ("1.5", Fraction(3, 2)), ("2k", 2000), ("1Ki", 1024), ("1.5Gi", 3 * 2**29)],
)
def test_quantities_are_exact(text: str, exact: Fraction) -> None:
    assert parse_quantity(text) == exact


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "-1", "1e3", ".5", "1.", "80GB", "1Gi\n", "１"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    assert not is_quantity(text)
    with pytest.raises(QuantityError, match="write one such as 64Gi, 500m or 2"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("amount", "normal"),
    [
        (4, "4"), ("4000m", "4"), ("1024Mi", "1Gi"), ("0.5", "500m"), ("0.5Gi", "512Mi"), ("1000", "1k"),
        ("0", "0"), ("0.0001", "1m"), ("1.9999", "2"), ("2P", "2P"),
        ("1500", "1500"), ("2048", "2Ki"), ("0.1Ki", "102400m"),
    ],
)  # fmt: skip
def test_the_normal_form_is_short_and_exact(amount: str | int, normal: str) -> None:
    assert normal_quantity(amount) == normal


@given(st.integers(0, 10**9), st.sampled_from(UNITS))
def test_a_quantity_in_its_normal_form_is_the_same_amount(number: int, unit: str) -> None:
    text = normal_quantity(f"{number}{unit}")
    assert parse_quantity(text) == parse_quantity(f"{number}{unit}")
    assert normal_quantity(text) == text


@given(st.integers(0, 10**6), st.sampled_from(UNITS), st.integers(0, 10**6), st.sampled_from(UNITS))
def test_equal_amounts_have_equal_normal_forms(one: int, unit: str, other: int, other_unit: str) -> None:
    left, right = f"{one}{unit}", f"{other}{other_unit}"
    assert (parse_quantity(left) == parse_quantity(right)) == (normal_quantity(left) == normal_quantity(right))


def test_bytes_are_rounded_up() -> None:
    assert quantity_bytes("64Gi") == 64 * 2**30
    assert quantity_bytes("1500m") == 2


@given(st.from_regex(QUANTITY, fullmatch=True) | st.text("0123456789.mkMGiK", max_size=8))
def test_the_api_server_reads_quantities_as_the_operator_does(text: str) -> None:
    assert crds.evaluate(IS_QUANTITY, text) == is_quantity(text)
