"""KV blocks between workers: what a block is, who holds it, how it moves.

* identity: block hashes and chains (`identity`);
* who is there and holds what: `WorkerAnnouncer` writes it to Redis, `ClusterMirror` and `BlockMirror` read it;
* how blocks move: `Transport` (`TcpTransport`, `UcxTransport`), pins at the holder, `PeerLinks` at the reader;
* where they lie: `DataPlane` over the pools of ranks, here (`LocalRankPlane`) or elsewhere (`RemoteRankPlane`).
"""

from antiphon_kvtransfer.access import RedisAccess, RedisUrlError, check_url
from antiphon_kvtransfer.announcer import WorkerAnnouncer
from antiphon_kvtransfer.cards import CardMismatch, LocalWorker
from antiphon_kvtransfer.cluster import ClusterMirror
from antiphon_kvtransfer.data_plane import DataPlane
from antiphon_kvtransfer.identity import (
    HASH_BYTES,
    BlockHash,
    ChainRoot,
    block_hash,
    chain_hashes,
    chain_root,
    contents_digest,
    iterate_chain,
)
from antiphon_kvtransfer.links import LinkError, LinkStatus, PeerAddress, PeerLink, PeerLinks
from antiphon_kvtransfer.local_plane import LocalRankPlane
from antiphon_kvtransfer.mirror import BlockMirror
from antiphon_kvtransfer.model_record import ModelRecord, ModelRecordError, decode_model_record, encode_model_record
from antiphon_kvtransfer.offer import TransportOffer
from antiphon_kvtransfer.pins import BlockKeeper, KvBlocksService, PinTable
from antiphon_kvtransfer.plane import KvPart, PeerPool, PeerRank, RankPlane, Wire
from antiphon_kvtransfer.records import RecordError, WorkerRecord
from antiphon_kvtransfer.remote_plane import RemoteRankPlane
from antiphon_kvtransfer.serve_plane import serve_rank_plane
from antiphon_kvtransfer.tcp import TcpTransport
from antiphon_kvtransfer.transport import (
    PeerKey,
    ReadHandle,
    ReadRange,
    Region,
    Transport,
    TransportError,
    TransportUnavailable,
)
from antiphon_kvtransfer.ucx import UcxTransport

__all__ = [
    "HASH_BYTES",
    "BlockHash",
    "BlockKeeper",
    "BlockMirror",
    "CardMismatch",
    "ChainRoot",
    "ClusterMirror",
    "DataPlane",
    "KvBlocksService",
    "KvPart",
    "LinkError",
    "LinkStatus",
    "LocalRankPlane",
    "LocalWorker",
    "ModelRecord",
    "ModelRecordError",
    "PeerAddress",
    "PeerKey",
    "PeerLink",
    "PeerLinks",
    "PeerPool",
    "PeerRank",
    "PinTable",
    "RankPlane",
    "ReadHandle",
    "ReadRange",
    "RecordError",
    "RedisAccess",
    "RedisUrlError",
    "Region",
    "RemoteRankPlane",
    "TcpTransport",
    "Transport",
    "TransportError",
    "TransportOffer",
    "TransportUnavailable",
    "UcxTransport",
    "Wire",
    "WorkerAnnouncer",
    "WorkerRecord",
    "block_hash",
    "chain_hashes",
    "chain_root",
    "check_url",
    "contents_digest",
    "decode_model_record",
    "encode_model_record",
    "iterate_chain",
    "serve_rank_plane",
]
