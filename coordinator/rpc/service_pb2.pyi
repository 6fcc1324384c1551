from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Head(_message.Message):
    __slots__ = ("epoch", "position", "chain")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    chain: bytes
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., chain: _Optional[bytes] = ...) -> None: ...

class Auth(_message.Message):
    __slots__ = ("peer_id", "session")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    session: bytes
    def __init__(self, peer_id: _Optional[str] = ..., session: _Optional[bytes] = ...) -> None: ...

class ChallengeRequest(_message.Message):
    __slots__ = ("peer_id",)
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    def __init__(self, peer_id: _Optional[str] = ...) -> None: ...

class ChallengeReply(_message.Message):
    __slots__ = ("nonce", "server_time_s")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_S_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    server_time_s: float
    def __init__(self, nonce: _Optional[bytes] = ..., server_time_s: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "version", "run_id", "peer_id", "role", "nonce", "signature", "token", "module")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    run_id: bytes
    peer_id: str
    role: str
    nonce: bytes
    signature: bytes
    token: bytes
    module: str
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., run_id: _Optional[bytes] = ..., peer_id: _Optional[str] = ..., role: _Optional[str] = ..., nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., token: _Optional[bytes] = ..., module: _Optional[str] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("spec", "admission", "session", "layout", "genesis_root", "epoch", "head", "bootstrap", "server_time_s", "heartbeat_s", "evicted", "module", "relocation")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GENESIS_ROOT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    RELOCATION_FIELD_NUMBER: _ClassVar[int]
    spec: bytes
    admission: bytes
    session: bytes
    layout: str
    genesis_root: bytes
    epoch: bytes
    head: Head
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    server_time_s: float
    heartbeat_s: float
    evicted: bytes
    module: str
    relocation: bytes
    def __init__(self, spec: _Optional[bytes] = ..., admission: _Optional[bytes] = ..., session: _Optional[bytes] = ..., layout: _Optional[str] = ..., genesis_root: _Optional[bytes] = ..., epoch: _Optional[bytes] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., bootstrap: _Optional[_Iterable[str]] = ..., server_time_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., evicted: _Optional[bytes] = ..., module: _Optional[str] = ..., relocation: _Optional[bytes] = ...) -> None: ...

class ProbeRequest(_message.Message):
    __slots__ = ("auth", "port", "nonce")
    AUTH_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    auth: Auth
    port: int
    nonce: bytes
    def __init__(self, auth: _Optional[_Union[Auth, _Mapping]] = ..., port: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ProbeReply(_message.Message):
    __slots__ = ("address", "reached")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    address: str
    reached: bool
    def __init__(self, address: _Optional[str] = ..., reached: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("auth", "status", "events", "traces", "leaving", "epoch_sha256", "retired", "evicted_sha256", "roster", "evidence", "relocation_sha256")
    AUTH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TRACES_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SHA256_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_SHA256_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    RELOCATION_SHA256_FIELD_NUMBER: _ClassVar[int]
    auth: Auth
    status: bytes
    events: _containers.RepeatedScalarFieldContainer[bytes]
    traces: _containers.RepeatedScalarFieldContainer[bytes]
    leaving: bool
    epoch_sha256: bytes
    retired: bool
    evicted_sha256: bytes
    roster: bytes
    evidence: bytes
    relocation_sha256: bytes
    def __init__(self, auth: _Optional[_Union[Auth, _Mapping]] = ..., status: _Optional[bytes] = ..., events: _Optional[_Iterable[bytes]] = ..., traces: _Optional[_Iterable[bytes]] = ..., leaving: _Optional[bool] = ..., epoch_sha256: _Optional[bytes] = ..., retired: _Optional[bool] = ..., evicted_sha256: _Optional[bytes] = ..., roster: _Optional[bytes] = ..., evidence: _Optional[bytes] = ..., relocation_sha256: _Optional[bytes] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("epoch", "head", "server_time_s", "bootstrap", "publish", "publish_from", "admission", "finished", "heartbeat_s", "evicted", "roster", "orders", "relocation", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SERVER_TIME_S_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FROM_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    RELOCATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    head: Head
    server_time_s: float
    bootstrap: _containers.RepeatedScalarFieldContainer[str]
    publish: bool
    publish_from: int
    admission: bytes
    finished: bool
    heartbeat_s: float
    evicted: bytes
    roster: bytes
    orders: _containers.RepeatedScalarFieldContainer[bytes]
    relocation: bytes
    version: str
    def __init__(self, epoch: _Optional[bytes] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., server_time_s: _Optional[float] = ..., bootstrap: _Optional[_Iterable[str]] = ..., publish: _Optional[bool] = ..., publish_from: _Optional[int] = ..., admission: _Optional[bytes] = ..., finished: _Optional[bool] = ..., heartbeat_s: _Optional[float] = ..., evicted: _Optional[bytes] = ..., roster: _Optional[bytes] = ..., orders: _Optional[_Iterable[bytes]] = ..., relocation: _Optional[bytes] = ..., version: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PublishHeader
    chunk: bytes
    def __init__(self, header: _Optional[_Union[PublishHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class PublishHeader(_message.Message):
    __slots__ = ("auth", "epoch", "position", "entry", "certificate", "body_bytes", "module")
    AUTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    auth: Auth
    epoch: int
    position: int
    entry: bytes
    certificate: bytes
    body_bytes: int
    module: str
    def __init__(self, auth: _Optional[_Union[Auth, _Mapping]] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., entry: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., body_bytes: _Optional[int] = ..., module: _Optional[str] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("accepted", "head", "send_body")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SEND_BODY_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    head: Head
    send_body: bool
    def __init__(self, accepted: _Optional[bool] = ..., head: _Optional[_Union[Head, _Mapping]] = ..., send_body: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("auth", "entries", "snapshot", "leaves", "tokenizer", "body", "module")
    AUTH_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    auth: Auth
    entries: EntryRange
    snapshot: SnapshotRequest
    leaves: LeafRange
    tokenizer: TokenizerRequest
    body: BodyRange
    module: str
    def __init__(self, auth: _Optional[_Union[Auth, _Mapping]] = ..., entries: _Optional[_Union[EntryRange, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., leaves: _Optional[_Union[LeafRange, _Mapping]] = ..., tokenizer: _Optional[_Union[TokenizerRequest, _Mapping]] = ..., body: _Optional[_Union[BodyRange, _Mapping]] = ..., module: _Optional[str] = ...) -> None: ...

class TokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EntryRange(_message.Message):
    __slots__ = ("start", "count")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class BodyRange(_message.Message):
    __slots__ = ("position", "start", "stop", "gives_way")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GIVES_WAY_FIELD_NUMBER: _ClassVar[int]
    position: int
    start: int
    stop: int
    gives_way: bool
    def __init__(self, position: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., gives_way: _Optional[bool] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("latest", "position")
    LATEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    latest: bool
    position: int
    def __init__(self, latest: _Optional[bool] = ..., position: _Optional[int] = ...) -> None: ...

class LeafRange(_message.Message):
    __slots__ = ("position", "start", "count", "gives_way")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GIVES_WAY_FIELD_NUMBER: _ClassVar[int]
    position: int
    start: int
    count: int
    gives_way: bool
    def __init__(self, position: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., gives_way: _Optional[bool] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("header", "chunk", "snapshot", "leaf")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LEAF_FIELD_NUMBER: _ClassVar[int]
    header: EntryHeader
    chunk: bytes
    snapshot: SnapshotInfo
    leaf: Leaf
    def __init__(self, header: _Optional[_Union[EntryHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., snapshot: _Optional[_Union[SnapshotInfo, _Mapping]] = ..., leaf: _Optional[_Union[Leaf, _Mapping]] = ...) -> None: ...

class EntryHeader(_message.Message):
    __slots__ = ("epoch", "position", "entry", "certificate", "chain", "body_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    entry: bytes
    certificate: bytes
    chain: bytes
    body_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., entry: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., chain: _Optional[bytes] = ..., body_bytes: _Optional[int] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("position", "chain", "root", "leaf_digests", "layout", "first_body", "signature")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    LEAF_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BODY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    position: int
    chain: bytes
    root: bytes
    leaf_digests: bytes
    layout: str
    first_body: int
    signature: bytes
    def __init__(self, position: _Optional[int] = ..., chain: _Optional[bytes] = ..., root: _Optional[bytes] = ..., leaf_digests: _Optional[bytes] = ..., layout: _Optional[str] = ..., first_body: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("token", "module", "viewer", "after")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    VIEWER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    module: str
    viewer: bytes
    after: int
    def __init__(self, token: _Optional[bytes] = ..., module: _Optional[str] = ..., viewer: _Optional[bytes] = ..., after: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("packed",)
    PACKED_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    def __init__(self, packed: _Optional[bytes] = ...) -> None: ...

class OrderRequest(_message.Message):
    __slots__ = ("token", "order", "viewer")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    VIEWER_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    order: bytes
    viewer: bytes
    def __init__(self, token: _Optional[bytes] = ..., order: _Optional[bytes] = ..., viewer: _Optional[bytes] = ...) -> None: ...

class OrderReply(_message.Message):
    __slots__ = ("spec", "next_number", "settings", "decided")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    spec: bytes
    next_number: int
    settings: bytes
    decided: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, spec: _Optional[bytes] = ..., next_number: _Optional[int] = ..., settings: _Optional[bytes] = ..., decided: _Optional[_Iterable[int]] = ...) -> None: ...

class InvitesRequest(_message.Message):
    __slots__ = ("request", "signature")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    signature: bytes
    def __init__(self, request: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class InvitesReply(_message.Message):
    __slots__ = ("invites",)
    INVITES_FIELD_NUMBER: _ClassVar[int]
    invites: bytes
    def __init__(self, invites: _Optional[bytes] = ...) -> None: ...
