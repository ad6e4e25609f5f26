"""The models that this gateway knows: a worker's card made usable.

A card is fetched once per digest and stays known when its last worker has gone: then the model has no worker (503),
but it is not unknown (404). Where workers of one name have different cards, the newest one seen counts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from antiphon_kvtransfer.identity import BlockHash, ChainRoot, chain_hashes, chain_root
from antiphon_proto import worker_pb2 as pb

from antiphon_gateway.templating import ChatTemplate, compiled, special_tokens
from antiphon_gateway.tokenization import TokenCodec
from antiphon_gateway.tokenization_cache import EncodingCache
from antiphon_gateway.wire_ids import WireIds

log = logging.getLogger("antiphon.gateway")

_ROOTS_KEPT = 4096
"""Chain roots, one a tenant, before they are made anew."""


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt ready to be routed: its ids, the ids of its full blocks, and its text where it is echoed."""

    token_ids: list[int]
    chain: tuple[BlockHash, ...]
    text: str = ""
    encoded: bytes = b""
    """Its ids as they are on the wire (`wire_ids`); empty: not made."""


class Model:
    """One model card with its tokenizer and template, loaded. What it says never changes."""

    def __init__(self, card: pb.ModelCard, encodings: EncodingCache | None = None) -> None:
        """Takes a while (the tokenizer): in a thread. `encodings`: as `TokenCodec` takes it.

        Raises TokenizerInvalid, TemplateInvalid.
        """
        self.name = card.model
        self.digest = card.digest
        self.created = int(time.time())
        self.max_context_tokens = card.max_context_tokens
        self.vocab_size = card.vocab_size
        self.block_tokens = card.block_tokens
        self.block_bytes = card.kv_block_bytes
        self.tokenizer_json = card.tokenizer_json
        self.eos_token_ids = tuple(card.eos_token_ids)
        self.codec = TokenCodec(card.tokenizer_json, encodings)
        self._tokens = special_tokens(card.tokenizer_config_json, bos_token=card.bos_token, eos_token=card.eos_token)
        self.template = ChatTemplate(card.chat_template, self._tokens) if card.chat_template else None
        self._revision = card.revision
        self._adapter = card.adapter
        self._kv_format = card.kv_format
        self._roots: dict[bytes, ChainRoot] = {}
        self.wire_ids = WireIds(card.vocab_size)

    def other_template(self, source: str) -> ChatTemplate:
        """One that a request brings. Compiling may take a while: in a thread. Raises TemplateInvalid."""
        return compiled(source, tuple(self._tokens.items()))

    def prompt(
        self, token_ids: list[int], salt: bytes, text: str = "", packed: array[int] | None = None, encoded: bytes = b""
    ) -> Prompt:
        """Block ids by the tenant's salt, for routing. `packed`, `encoded`: the same ids as an array and as they are on
        the wire, where there are such."""
        if packed is None:
            packed = array("I", token_ids)
        if not encoded:
            # A tokenizer may know ids that the model does not.
            with contextlib.suppress(IndexError):
                encoded = self.wire_ids.encoded(packed)
        chain = chain_hashes(self._root(salt), packed, self.block_tokens)
        return Prompt(token_ids, tuple(chain), text, encoded)

    def chain_with(self, prompt: Prompt, output: Sequence[int], salt: bytes) -> tuple[BlockHash, ...]:
        """Block ids of the prompt and of what was generated after it. `salt`: the prompt's."""
        known = len(prompt.chain)
        parent = ChainRoot(prompt.chain[-1]) if known else self._root(salt)
        rest = [*prompt.token_ids[known * self.block_tokens :], *output]
        return (*prompt.chain, *chain_hashes(parent, rest, self.block_tokens))

    def _root(self, salt: bytes) -> ChainRoot:
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= _ROOTS_KEPT:
                self._roots.clear()
            root = self._roots[salt] = chain_root(
                model=self.name,
                revision=self._revision,
                adapter=self._adapter,
                kv_format=self._kv_format,
                salt=salt,
            )
        return root


class ModelRegistry:
    """Model names and cards. Owned by the fleet, read by everybody."""

    def __init__(self, encodings: EncodingCache | None = None) -> None:
        """`encodings`: what its models' tokenizers share."""
        self.encodings = encodings
        self._by_digest: dict[str, Model] = {}
        self._by_name: dict[str, Model] = {}

    def get(self, name: str) -> Model | None:
        return self._by_name.get(name)

    def by_digest(self, digest: str) -> Model | None:
        return self._by_digest.get(digest)

    def add(self, model: Model) -> None:
        previous = self._by_name.get(model.name)
        if previous is not None and previous.digest != model.digest:
            log.warning("model %s has a new card: %s instead of %s", model.name, model.digest, previous.digest)
        self._by_digest[model.digest] = model
        self._by_name[model.name] = model

    def prefer(self, digests: Iterable[str]) -> None:
        """Where a name has several cards and the current one has no worker left, take one that has (`digests`)."""
        live = [model for digest in digests if (model := self._by_digest.get(digest)) is not None]
        served = {model.digest for model in live}
        for model in live:
            if self._by_name[model.name].digest not in served:
                self._by_name[model.name] = model

    def __iter__(self) -> Iterator[Model]:
        return iter(self._by_name.values())
