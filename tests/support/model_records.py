"""The operator's voice in Redis, for tests of those who listen to it."""

from __future__ import annotations

import time
from typing import Any

import redis
from antiphon_kvtransfer.keys import MODELS_KEY, ModelKeys
from antiphon_kvtransfer.model_record import ModelRecord, encode_model_record

from tests.support.valkey import Valkey

KEY = "chat/qwen"


def model_record(model: str = KEY, **fields: Any) -> ModelRecord:
    values: dict[str, Any] = {"model": model, "generation": 1, "names": ("qwen",), "revisions": {}}
    return ModelRecord(**(values | fields))


class OperatorVoice:
    """Writes records as the operator does."""

    def __init__(self, server: Valkey) -> None:
        self.redis: Any = redis.Redis.from_url(server.url, protocol=2)

    def put(self, record: ModelRecord) -> None:
        self.write(record.model, encode_model_record(record), record.ttl_ms)

    def write(self, model: str, raw: bytes, ttl_ms: int = 60_000) -> None:
        self.redis.set(ModelKeys(model).model_record, raw, px=ttl_ms)
        self.redis.zadd(MODELS_KEY, {model: int(time.time() * 1000) + ttl_ms})

    def forget(self, model: str = KEY) -> None:
        """As when the record has run out."""
        self.redis.delete(ModelKeys(model).model_record)
        self.redis.zrem(MODELS_KEY, model)
