"""A round's plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.request import RequestId
from pdserve.scheduler.plan import HostCopy, Reservation, Row, SlotStart
from pdserve.scheduler.state import Tracked


@dataclass(slots=True)
class Draft:
    """What the round holds so far, and what is left of it.

    A prefill that could not take all it wanted seals the round for prefills behind it; an image that waits for blocks
    seals it for new requests of every route. num_owed: blocks that answers lack for their next tokens; None = not
    counted since that changed. blocked_prefills and blocked_decodes: those that lacked nothing but blocks, in the
    order in which they were tried.
    """

    tokens_left: int
    rows_left: int
    allow_prefill: bool
    starts: list[SlotStart] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    decode: list[Row] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    copies: list[HostCopy] = field(default_factory=list)
    num_owed: int | None = None
    is_sealed: bool = False
    is_sealed_for_new: bool = False
    blocked_prefills: list[Tracked] = field(default_factory=list)
    blocked_decodes: list[Tracked] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.tokens_left <= 0 or self.rows_left <= 0

    @property
    def batch_size(self) -> int:
        return len(self.prefill) + len(self.decode)

    def drop_decode(self, request_id: RequestId) -> None:
        """Take back a decode row that was planned, with its slot's start; its request leaves the device."""
        num_rows = len(self.decode)
        self.decode = [row for row in self.decode if row.request_id != request_id]
        self.starts = [start for start in self.starts if start.request_id != request_id]
        self.tokens_left += num_rows - len(self.decode)
        self.rows_left += num_rows - len(self.decode)
