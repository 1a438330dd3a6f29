from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GateDecision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GATE_DECISION_UNSPECIFIED: _ClassVar[GateDecision]
    GATE_DECISION_ANY: _ClassVar[GateDecision]
    GATE_DECISION_ALL: _ClassVar[GateDecision]
    GATE_DECISION_BURST: _ClassVar[GateDecision]
    GATE_DECISION_IDLE: _ClassVar[GateDecision]
    GATE_DECISION_BETWEEN: _ClassVar[GateDecision]
    GATE_DECISION_UNWANTED: _ClassVar[GateDecision]
    GATE_DECISION_DECODING: _ClassVar[GateDecision]
    GATE_DECISION_LIMIT: _ClassVar[GateDecision]
    GATE_DECISION_CADENCE: _ClassVar[GateDecision]
GATE_DECISION_UNSPECIFIED: GateDecision
GATE_DECISION_ANY: GateDecision
GATE_DECISION_ALL: GateDecision
GATE_DECISION_BURST: GateDecision
GATE_DECISION_IDLE: GateDecision
GATE_DECISION_BETWEEN: GateDecision
GATE_DECISION_UNWANTED: GateDecision
GATE_DECISION_DECODING: GateDecision
GATE_DECISION_LIMIT: GateDecision
GATE_DECISION_CADENCE: GateDecision

class StreamRoundsRequest(_message.Message):
    __slots__ = ("last", "follow")
    LAST_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    last: int
    follow: bool
    def __init__(self, last: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("number", "group_number", "start_us", "plan_us", "gather_us", "forward_at_us", "forward_us", "total_us", "num_prefill_rows", "num_prefill_tokens", "num_decode_rows", "vote", "decision", "is_held", "num_largest_tokens", "num_transfers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GROUP_NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    PLAN_US_FIELD_NUMBER: _ClassVar[int]
    GATHER_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_AT_US_FIELD_NUMBER: _ClassVar[int]
    FORWARD_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_ROWS_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    NUM_LARGEST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    group_number: int
    start_us: int
    plan_us: int
    gather_us: int
    forward_at_us: int
    forward_us: int
    total_us: int
    num_prefill_rows: int
    num_prefill_tokens: int
    num_decode_rows: int
    vote: bool
    decision: GateDecision
    is_held: bool
    num_largest_tokens: int
    num_transfers: int
    def __init__(self, number: _Optional[int] = ..., group_number: _Optional[int] = ..., start_us: _Optional[int] = ..., plan_us: _Optional[int] = ..., gather_us: _Optional[int] = ..., forward_at_us: _Optional[int] = ..., forward_us: _Optional[int] = ..., total_us: _Optional[int] = ..., num_prefill_rows: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_rows: _Optional[int] = ..., vote: _Optional[bool] = ..., decision: _Optional[_Union[GateDecision, str]] = ..., is_held: _Optional[bool] = ..., num_largest_tokens: _Optional[int] = ..., num_transfers: _Optional[int] = ...) -> None: ...

class StreamRoundsResponse(_message.Message):
    __slots__ = ("rank", "rounds", "num_lost", "newest", "unix_offset_us")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    UNIX_OFFSET_US_FIELD_NUMBER: _ClassVar[int]
    rank: int
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    num_lost: int
    newest: int
    unix_offset_us: int
    def __init__(self, rank: _Optional[int] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ..., num_lost: _Optional[int] = ..., newest: _Optional[int] = ..., unix_offset_us: _Optional[int] = ...) -> None: ...
