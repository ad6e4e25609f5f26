"""The model card: all that a gateway must know of a model, made from what the engine knows."""

from __future__ import annotations

import hashlib

from antiphon_engine.interface import ModelInfo
from antiphon_proto.worker_pb2 import ModelCard


def model_card(info: ModelInfo) -> ModelCard:
    """The card, with the digest of its own content, by which gateways tell equal cards without fetching them."""
    card = ModelCard(
        model=info.model,
        revision=info.revision,
        architecture=info.architecture,
        kv_format=info.kv_format,
        block_tokens=info.block_tokens,
        kv_block_bytes=info.kv_block_bytes,
        max_context_tokens=info.max_context_tokens,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        tokenizer_json=info.tokenizer_json,
        chat_template=info.chat_template,
        bos_token=info.bos_token,
        eos_token=info.eos_token,
        adapter=info.adapter,
        tokenizer_config_json=info.tokenizer_config_json,
    )
    card.digest = hashlib.sha256(card.SerializeToString(deterministic=True)).hexdigest()
    return card
