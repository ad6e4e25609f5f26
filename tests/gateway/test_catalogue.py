"""Names that clients use, and which Model each is."""

from __future__ import annotations

from antiphon_gateway.catalogue import Catalogue
from antiphon_kvtransfer.model_record import ModelRecord

from tests.support.model_records import model_record


def catalogue(*records: ModelRecord) -> Catalogue:
    made = Catalogue()
    made.update({record.model: record for record in records})
    return made


def test_every_name_leads_to_its_model() -> None:
    known = catalogue(model_record("a/m", names=("m", "alias")), model_record("b/n", names=("n",), draining=("w1",)))
    assert {name: record.model for name, record in known.names()} == {"m": "a/m", "alias": "a/m", "n": "b/n"}
    assert known.key_of("a/m") is None
    assert known.draining("b/n") == {"w1"}
    assert known.draining("a/m") == frozenset()


def test_of_two_models_with_one_name_the_older_keeps_it() -> None:
    old = model_record("z/old", names=("m",), created_at_ms=1000)
    new = model_record("a/new", names=("m", "other"), created_at_ms=2000)
    for records in ((old, new), (new, old)):
        known = catalogue(*records)
        assert known.key_of("m") == "z/old"
        assert known.key_of("other") == "a/new"


def test_where_none_says_how_old_it_is_the_holder_keeps_the_name() -> None:
    holder, newcomer = model_record("z/m", names=("m",)), model_record("a/m", names=("m",))
    known = catalogue(holder)
    known.update({"a/m": newcomer, "z/m": holder})
    assert known.key_of("m") == "z/m"
    known.update({"a/m": newcomer})
    assert known.key_of("m") == "a/m"
    assert catalogue(holder, newcomer).key_of("m") == catalogue(newcomer, holder).key_of("m") == "a/m"


def test_names_come_and_go_in_place() -> None:
    known = catalogue(model_record("a/m", names=("m", "n")))
    known.update({"a/m": model_record("a/m", names=("n", "o"))})
    assert [known.key_of(name) for name in ("m", "n", "o")] == [None, "a/m", "a/m"]
