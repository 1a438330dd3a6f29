"""Where a handoff's time goes, by the moments at which its messages came by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pdserve.bench.handoff_witness import Passed


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds.

    to_start: from the caller's request to Start on its way. to_accepted: until P has room for it. compute: until P
    announced the last chunk. to_first: until the first token came by. transfer: from the last chunk's announcement to
    Release: what is read when P is done. confirm: Release to Released. to_second: Released to the caller's next token.
    all_reads: of every READ, one after the other.
    """

    to_start: float
    to_accepted: float
    compute: float
    to_first: float
    transfer: float
    confirm: float
    to_second: float
    all_reads: float

    @property
    def hidden_share(self) -> float:
        """Of the time on the wire, what passed while P computed: at least this, as `transfer` has messages too."""
        return 1.0 - min(self.transfer, self.all_reads) / self.all_reads

    @classmethod
    def names(cls) -> list[str]:
        return [field.name.replace("_", " ") for field in fields(cls)]

    def parts_ms(self) -> list[float]:
        return [1000 * getattr(self, field.name) for field in fields(self)]


def split_of(log: Sequence[Passed], started_s: float, piece_times_s: Sequence[float], all_reads_s: float) -> Split:
    """The last handoff in the log is the request's. started_s, piece_times_s: its caller's, of the same clock."""
    begin = max(at for at, passed in enumerate(log) if passed.kind == "start")
    mine = [passed for passed in log[begin:] if passed.request_id == log[begin].request_id]
    at_s = {passed.kind: passed.at_s for passed in mine if passed.kind != "chunk_ready"}
    chunks = [passed for passed in mine if passed.kind == "chunk_ready"]
    second_s = next(piece_s for piece_s in piece_times_s if piece_s > at_s["released"])
    return Split(
        to_start=at_s["start"] - started_s,
        to_accepted=at_s["accepted"] - at_s["start"],
        compute=chunks[-1].at_s - at_s["accepted"],
        to_first=max(0.0, at_s["first_token"] - chunks[-1].at_s),
        transfer=at_s["release"] - chunks[-1].at_s,
        confirm=at_s["released"] - at_s["release"],
        to_second=second_s - at_s["released"],
        all_reads=all_reads_s,
    )
