"""Ids by table are the ids that protobuf reads, and what is not in the vocabulary is refused."""

from __future__ import annotations

from array import array

import pytest
from antiphon_gateway.wire_ids import WireIds, submit_message
from antiphon_proto import worker_pb2 as pb


@pytest.mark.parametrize("count", [0, 1, 31, 32, 5000])
def test_a_prompt_is_read_as_it_was_written(count: int) -> None:
    vocab_size = (1 << 21) + 9
    ids = [0, 127, 128, 16383, 16384, (1 << 21) - 1, 1 << 21, vocab_size - 1] * (count // 8 + 1)
    ids = ids[:count]
    submit = pb.Submit(ref=7, request_id="r" * (count % 200), sampling=pb.Sampling(seed=2**64 - 1))
    written = submit_message(submit.SerializeToString(), WireIds(vocab_size).encoded(array("I", ids)))
    submit.prompt_token_ids.extend(ids)
    assert pb.GatewayMessage.FromString(written) == pb.GatewayMessage(submit=submit)


@pytest.mark.parametrize("vocab_size", [1, 259, 151_936])
def test_ids_beyond_the_vocabulary(vocab_size: int) -> None:
    wire_ids = WireIds(vocab_size)
    assert wire_ids.encoded(array("I", [0, vocab_size - 1]))
    for beyond in (vocab_size, 2**31, 2**32 - 1):
        with pytest.raises(IndexError):
            wire_ids.encoded(array("I", [0, beyond]))
