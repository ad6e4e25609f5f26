"""Block identity: what makes two KV blocks the same block.

A full block's id is a hash of everything that determines its content: the chain root (model and revision,
adapter, KV format, tenant salt) and every token up to the block's end. So blocks are immutable, equal ids mean
equal content wherever they are held, and a chain's ids can be computed from tokens alone, with no worker asked.

`block_hash = SHA-256(parent_hash || tokens)` truncated to 16 bytes, tokens as 4-byte little-endian integers;
the first parent is the chain root. Fields of the root are framed by their length, so that no two different
tuples of fields give the same bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the identity of one full KV block."""

ChainRoot = NewType("ChainRoot", bytes)
"""16 bytes: the parent of a chain's first block."""

HASH_BYTES = 16

_TOKEN_TYPE = "I" if array("I").itemsize == 4 else "L"


def chain_root(*, model: str, revision: str, adapter: str, kv_format: str, salt: bytes) -> ChainRoot:
    """The root of all chains that may share blocks: same model content, adapter, KV format and tenant salt."""
    digest = hashlib.sha256()
    for field in (model.encode(), revision.encode(), adapter.encode(), kv_format.encode(), salt):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return ChainRoot(digest.digest()[:HASH_BYTES])


def block_hash(parent: BlockHash | ChainRoot, tokens: Sequence[int]) -> BlockHash:
    """The id of the full block that holds `tokens` (exactly `block_tokens` of them) after `parent`."""
    return BlockHash(hashlib.sha256(parent + _token_bytes(tokens)).digest()[:HASH_BYTES])


def chain_hashes(root: ChainRoot, tokens: Sequence[int], block_tokens: int) -> list[BlockHash]:
    """Ids of all full blocks of `tokens`, in order: `len(tokens) // block_tokens` of them."""
    raw = _token_bytes(tokens)
    step, sha256 = block_tokens * 4, hashlib.sha256
    parent: bytes = root
    chain: list[BlockHash] = []
    for start in range(0, len(raw) - step + 1, step):
        parent = sha256(parent + raw[start : start + step]).digest()[:HASH_BYTES]
        chain.append(BlockHash(parent))
    return chain


def iterate_chain(root: ChainRoot, tokens: Sequence[int], block_tokens: int) -> Iterator[BlockHash]:
    """As `chain_hashes`, one id at a time."""
    raw = memoryview(_token_bytes(tokens))
    step = block_tokens * 4
    parent: bytes = root
    for start in range(0, len(raw) - step + 1, step):
        parent = hashlib.sha256(parent + raw[start : start + step]).digest()[:HASH_BYTES]
        yield BlockHash(parent)


def contents_digest(hashes: Iterable[BlockHash]) -> str:
    """Equal for equal sets of blocks only: SHA-256 of all hashes in order, in hexadecimal digits."""
    return hashlib.sha256(b"".join(sorted(hashes))).hexdigest()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    values = tokens if isinstance(tokens, array) and tokens.typecode == _TOKEN_TYPE else array(_TOKEN_TYPE, tokens)
    if _LITTLE_ENDIAN:
        return values.tobytes()
    swapped = array(_TOKEN_TYPE, values)
    swapped.byteswap()
    return swapped.tobytes()


_LITTLE_ENDIAN = array("H", [1]).tobytes() == b"\x01\x00"
