"""One prompt's handoff, seen from the prefill node: what its rank and its decode node say, and what D is told of it.

The rank's loop and the transport of each of its processes speak for themselves, in any order. D hears of the lease
first, once it stands in every process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.engine.front import Rank
from pdserve.engine.messages import (
    ChunkAnnounced,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
    Output,
    ReleaseLease,
    RenewLease,
)
from pdserve.errors import ProtocolError, TransferFailed, named
from pdserve.request import LeaseId
from pdserve.rpc.handoff import (
    Accepted,
    ChunkReady,
    Computing,
    FirstToken,
    HandoffAbort,
    Queued,
    Release,
    Released,
    Renew,
    ToDecode,
    life_s,
)
from prefill_node.parts import FromPart, Parts
from prefill_node.workload import Workload

# How often D hears of a prompt that is queued or computing, when nothing else is said. The protocol says 2 at most.
PROGRESS_S = 1.0


class StreamClosed:
    """D's side of the stream has ended."""


@dataclass(slots=True)
class Handoff:
    """One prompt on its way: what D was told so far.

    lease_s: how long a lease lives unrenewed. held: what came before the lease stood in every process. is_left: D has
    not been told how it ended; if it goes now, it leaves the prompt behind.
    """

    lease_id: LeaseId
    rank: Rank
    workload: Workload
    num_prompt_tokens: int
    lease_s: float
    is_over: bool = False
    is_left: bool = True
    progress_due_s: float = field(default_factory=lambda: time.monotonic() + PROGRESS_S)
    _parts: Parts = field(init=False)
    _held: list[Output | FromPart] = field(default_factory=list)
    _is_accepted: bool = False
    _first_token: FirstToken | None = None
    _is_release_asked: bool = False

    def __post_init__(self) -> None:
        self._parts = Parts(len(self.rank.members))

    @property
    def num_tokens_done(self) -> int:
        """Of the prompt."""
        return self.num_prompt_tokens if self._first_token is not None else self._parts.num_tokens_done

    def put_off_progress(self) -> None:
        """D hears something else just now."""
        self.progress_due_s = time.monotonic() + PROGRESS_S

    def progress(self) -> Sequence[ToDecode]:
        """Nothing where the rank may stand still: D must not take the front's life for the rank's."""
        self.put_off_progress()
        self.rank.ask_for_life()
        if not self.rank.is_alive(life_s(self.lease_s, self.rank.longest_round_s)):
            return ()
        computed = self.rank.num_tokens_computed
        if self._is_accepted:
            return (Computing(self._parts.num_tokens_done, computed),)
        return (Queued(self.workload.num_ahead(self.lease_id), computed),)

    def answer(self, message: object) -> Sequence[ToDecode]:
        """What D is told of it, if anything. Raises what ends the handoff with an error."""
        match message:
            case FromPart():
                return self._on_part(message)
            case Output(token_ids=(_, *_)) if not self._is_accepted:
                self._held.append(message)
                return ()
            case Output():
                first = self._first_token = _first_token_of(message)
                # One that ends the answer is all D wants.
                self.is_left = first.finish is None
                return (first,)
            case Renew() | Release():
                self._on_lease_message(message)
                return ()
            case HandoffAbort() | StreamClosed():
                self.is_over = True
                return ()
            case Exception():
                raise message
            case _:
                raise ProtocolError(f"{type(message).__name__} out of order")

    def _on_part(self, said: FromPart) -> Sequence[ToDecode]:
        match said.message:
            case LeaseOpened():
                return self._accept() if self._parts.open(said.part) else ()
            case ChunkAnnounced() if not self._is_accepted:
                self._held.append(said)
                return ()
            case ChunkAnnounced(seq=seq, first_token=first, end_token=end, blocks=blocks, block_hashes=hashes):
                self._parts.announce(said.part, end)
                rank = self.rank.number * len(self.rank.members) + said.part
                return (ChunkReady(rank, seq, first, end, blocks, hashes),)
            case LeaseAnswer(valid=valid):
                is_valid = self._parts.answer(said.part, is_valid=valid)
                return () if is_valid is None else self._end_with(Released(is_valid))
            case LeaseGone(reason=reason):
                return self._end_with(HandoffAbort(reason))
            case _:
                raise AssertionError(f"{said.message} is not about a lease")

    def _accept(self) -> Sequence[ToDecode]:
        """The lease stands in every process: what was held may be told."""
        self._is_accepted = True
        self.workload.accept(self.lease_id)
        held, self._held = self._held, []
        told = [said for message in held for said in self.answer(message)]
        return (Accepted(self.lease_id, num_ranks=len(self.rank.members)), *told)

    def _end_with(self, last: Released | HandoffAbort) -> Sequence[ToDecode]:
        self.is_over, self.is_left = True, False
        return (last,)

    def _on_lease_message(self, message: Renew | Release) -> None:
        if not self._is_accepted or message.lease_id != self.lease_id:
            raise ProtocolError(f"lease_id {message.lease_id!r} is not this stream's")
        if isinstance(message, Renew):
            self.rank.tell_transport(RenewLease(self.lease_id))
            return
        if not self._is_complete or self._is_release_asked:
            raise ProtocolError("Release came before the last chunk and the first token, or twice")
        self._is_release_asked = True
        self.rank.tell_transport(ReleaseLease(self.lease_id))

    @property
    def _is_complete(self) -> bool:
        """D knows everything it needs to pull the whole prompt."""
        return self._first_token is not None and self._parts.have_announced(self._first_token.num_chunks)


def _first_token_of(output: Output) -> FirstToken:
    """Raises the error the output carries, TransferFailed for a prompt that was given up here."""
    if output.error_name:
        raise named(output.error_name, output.error_message)
    if not output.token_ids:
        raise TransferFailed("the prefill node gave the prompt up")
    return FirstToken(
        token_id=output.token_ids[0],
        num_chunks=output.num_chunks,
        num_cached_tokens=output.num_cached_tokens,
        logprobs=output.logprobs[0] if output.logprobs else None,
        finish=output.finish,
        matched_stop_token=output.matched_stop_token,
        prompt_logprobs=output.prompt_logprobs,
    )
