"""Block identity: equal ids exactly where the content is equal."""

from __future__ import annotations

import hashlib
import struct
from array import array

import pytest
from antiphon_kvtransfer.identity import HASH_BYTES, block_hash, chain_hashes, chain_root, iterate_chain
from hypothesis import given
from hypothesis import strategies as st

TOKENS = st.lists(st.integers(min_value=0, max_value=2**32 - 1), max_size=40)
FIELD = st.text(max_size=6)
ROOT = chain_root(model="m", revision="r", adapter="", kv_format="float32/4/mha", salt=b"")


def test_golden_vectors() -> None:
    """ai-dynamo/dynamo#8197: two sides that hash differently share nothing, in silence. These bytes never change."""
    root = chain_root(model="demo", revision="abc", adapter="", kv_format="bfloat16/64/gqa", salt=b"tenant")
    chain = chain_hashes(root, range(128), 64)
    assert root.hex() == "41324b5f35789edb2544db3a5b42da0f"
    assert [block.hex() for block in chain] == ["be5d8aef20e313b573bd10b4038fdf9b", "619fd4b8e5cea96628192e0ba8fdaf9e"]


def test_the_formula_written_out() -> None:
    framed = b"".join(struct.pack("<Q", len(part)) + part for part in (b"m", b"r", b"a", b"f", b"s"))
    root = chain_root(model="m", revision="r", adapter="a", kv_format="f", salt=b"s")
    assert root == hashlib.sha256(framed).digest()[:16]
    assert block_hash(root, [1, 2]) == hashlib.sha256(root + struct.pack("<II", 1, 2)).digest()[:16]


@given(
    st.tuples(FIELD, FIELD, FIELD, FIELD, st.binary(max_size=6)),
    st.tuples(FIELD, FIELD, FIELD, FIELD, st.binary(max_size=6)),
)
def test_different_roots_for_different_content(
    one: tuple[str, str, str, str, bytes], other: tuple[str, str, str, str, bytes]
) -> None:
    """llm-d/llm-d-kv-cache#243, vllm-project/vllm#44701: base, adapter and salt must not share block ids."""
    roots = [chain_root(model=m, revision=r, adapter=a, kv_format=k, salt=s) for m, r, a, k, s in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)


@pytest.mark.parametrize("moved", [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")])
def test_fields_are_framed(moved: tuple[str, str]) -> None:
    """An adapter name that continues a revision is not the same root (llm-d/llm-d-router#2927)."""
    revision, adapter = moved
    others = {("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")} - {moved}
    root = chain_root(model="m", revision=revision, adapter=adapter, kv_format="f", salt=b"")
    assert all(root != chain_root(model="m", revision=r, adapter=a, kv_format="f", salt=b"") for r, a in others)


@given(TOKENS, TOKENS, st.integers(min_value=1, max_value=5))
def test_chains_agree_exactly_on_the_common_full_blocks(one: list[int], other: list[int], block_tokens: int) -> None:
    chains = [chain_hashes(ROOT, tokens, block_tokens) for tokens in (one, other)]
    for index, (left, right) in enumerate(zip(*chains, strict=False)):
        end = (index + 1) * block_tokens
        assert (left == right) == (one[:end] == other[:end])


@given(TOKENS, st.integers(min_value=1, max_value=5))
def test_a_chain_is_block_hash_repeated(tokens: list[int], block_tokens: int) -> None:
    chain = chain_hashes(ROOT, tokens, block_tokens)
    assert len(chain) == len(tokens) // block_tokens
    assert chain == list(iterate_chain(ROOT, array("I", tokens), block_tokens))
    parent: bytes = ROOT
    for index, found in enumerate(chain):
        parent = block_hash(parent, tokens[index * block_tokens : (index + 1) * block_tokens])  # type: ignore[arg-type]
        assert found == parent
        assert len(found) == HASH_BYTES
