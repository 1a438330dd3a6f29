"""One request on its way at a decode node: where its prompt is prefilled, and what its client has been sent."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace

from decode_node.fallbacks import Fallbacks
from decode_node.handoffs import HandoffFailed, Handoffs, PromptPrefilled
from decode_node.peers import Assignment, PeerTable
from pdserve.config import DecodeFallback
from pdserve.engine.front import Inbox, delta_of
from pdserve.engine.messages import Output, ReservationTakenBack, Reserved
from pdserve.engine.ranks import Ranks
from pdserve.errors import PdserveError, PeerBusy, PeerError, PeerMismatch, PeerReplaced, TransferFailed
from pdserve.request import DECODE_ONLY, FUSED, Route, TokenDelta, TokenRequest, TransferId
from pdserve.rpc.handoff import FirstToken

# Handoffs of one prompt that may fail before its first token. A prompt that two peers failed with is prefilled here.
MAX_FAILED_HANDOFFS = 2
# How long a prompt waits for a peer that was started anew to be described and connected.
DESCRIBE_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class HandoffPolicy:
    """fallback: what happens when no peer can serve or a transfer failed. min_tokens: fewer uncached ones stay here."""

    fallback: DecodeFallback
    min_tokens: int


@dataclass(frozen=True, slots=True)
class Means:
    """What every answer of a node works with."""

    ranks: Ranks
    peers: PeerTable
    handoffs: Handoffs
    policy: HandoffPolicy
    fallbacks: Fallbacks
    counters: Counter[str]

    @property
    def num_parts(self) -> int:
        """Processes of each data-parallel rank."""
        return len(self.ranks[0].members)


class Answer:
    """`deltas` it once, at once: the rank is chosen by what the ranks have to do now."""

    def __init__(self, request: TokenRequest, means: Means) -> None:
        """Raises InvalidRequest for a rank that is not there, RequestIdInUse."""
        self._request = request
        self._deadline = None if request.time_left_s is None else time.monotonic() + request.time_left_s
        self._means = means
        self._rank = means.ranks.choose(request)
        self._assignment: Assignment | None = None
        self._placement = ""
        self._handoff: asyncio.Task[None] | None = None
        self._num_attempts = 0
        self._num_failed = 0
        self._transfer_id: TransferId | None = None  # of the handoff under way
        self._first: FirstToken | None = None
        self._is_over = False

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """Until the answer's end. Raises what the rank, or under policy `fail` the handoff, failed with."""
        route = self._choose_route()
        try:
            inbox = self._rank.open(self._request, route)
        except PdserveError:
            self._leave_peer()
            raise
        try:
            while not self._is_over:
                message = await inbox.get()
                match message:
                    case Reserved():
                        self._start_handoff(message, inbox)
                    case ReservationTakenBack():
                        await self._end_handoff()
                    case PromptPrefilled(transfer_id, first) if transfer_id == self._transfer_id:
                        yield self._on_first_token(first)
                    case HandoffFailed(transfer_id, error) if transfer_id == self._transfer_id:
                        await self._on_failed(transfer_id, error)
                    case Output():
                        yield self._on_output(message)
                    case Exception():
                        raise message
        finally:
            await self._close()

    # ------------------------------------------------------------ where

    def _choose_route(self) -> Route:
        if len(self._request.prompt) < self._means.policy.min_tokens:
            self._stay_on_purpose()
            return FUSED
        return DECODE_ONLY if self._choose_peer() else FUSED

    def _stay_on_purpose(self) -> None:
        self._placement = "local;reason=short_prompt"
        self._means.counters["local_prefills_total"] += 1

    def _choose_peer(self) -> bool:
        """False where none can be had, and the prompt is prefilled here."""
        self._assign(self._means.peers.assign(self._request.prompt))
        if self._assignment is None:
            self._fall_back(self._means.peers.why_none(len(self._request.prompt)), "no_peer")
        return self._assignment is not None

    def _assign(self, assignment: Assignment | None) -> None:
        self._assignment = assignment
        if assignment is not None:
            attempt = f";attempt={self._num_failed + 1}" if self._num_failed else ""
            self._placement = f"remote;peer={assignment.peer.target}{attempt}"

    def _fall_back(self, error: PeerError, reason: str) -> None:
        """Prefill here, never silently. Raises an error that names the reason where the policy is to fail."""
        reason = {PeerMismatch: "peer_mismatch", PeerBusy: "peer_busy"}.get(type(error), reason)
        if self._means.policy.fallback is DecodeFallback.FAIL:
            self._means.fallbacks.refuse(self._request.request_id, reason, error)
            kind = PeerError if isinstance(error, PeerReplaced) else type(error)
            raise kind(f"{error.message} (reason={reason})") from None
        self._placement = f"local;reason={reason}"
        self._means.fallbacks.add(self._request.request_id, reason, error)

    # ------------------------------------------------------------ what comes

    def _start_handoff(self, reserved: Reserved, inbox: Inbox) -> None:
        """The peer was chosen before the request had its slot, and may be gone since: then it is another's turn.

        Only now is it known how much of the prompt is cached here: too little may be left for a handoff.
        """
        if self._first is not None:  # the reservation before was taken back while its first token was on its way
            self._give_up(reserved.transfer_id, TransferFailed("the reservation was taken back"))
            return
        if len(self._request.prompt) - reserved.num_cached_tokens < self._means.policy.min_tokens:
            self._leave_peer()
            self._stay_on_purpose()
            self._rank.give_up_transfer(reserved.transfer_id, ())
            return
        if self._assignment is None or not self._assignment.peer.is_ready:
            self._leave_peer()
            if not self._choose_peer():
                self._rank.give_up_transfer(reserved.transfer_id, ())
                return
        self._hand_off(reserved, inbox)

    def _hand_off(self, reserved: Reserved, inbox: Inbox) -> None:
        assert self._assignment is not None
        peer = self._assignment.peer
        time_left_s = None if self._deadline is None else self._deadline - time.monotonic()
        self._handoff = self._means.handoffs.start(
            peer, self._rank, reserved, self._request, inbox, attempt=self._num_attempts, time_left_s=time_left_s
        )
        peer.begin_handoff()
        self._handoff.add_done_callback(lambda _: peer.end_handoff())
        if self._num_attempts == 0:
            self._means.counters["remote_prefills_total"] += 1
        self._num_attempts += 1
        self._transfer_id = reserved.transfer_id

    def _on_first_token(self, first: FirstToken) -> TokenDelta:
        """Streamed at once: the client does not wait for the KV, nor for its confirmation."""
        self._leave_peer()
        self._first = first
        self._is_over = first.finish is not None
        return TokenDelta(
            token_ids=(first.token_id,),
            logprobs=(first.logprobs,) if first.logprobs is not None else (),
            finish=first.finish,
            matched_stop_token=first.matched_stop_token,
            num_cached_tokens=first.num_cached_tokens,
            prompt_logprobs=first.prompt_logprobs,
            placement=self._placement,
        )

    async def _on_failed(self, transfer_id: TransferId, error: PeerError) -> None:
        """Another peer may try while the client has been sent nothing; else go on here with the very next token."""
        self._num_failed += 1
        if self._first is None and self._num_failed < MAX_FAILED_HANDOFFS and await self._found_another(error):
            self._means.counters["remote_prefill_retries_total"] += 1
            self._transfer_id = None
            self._rank.give_up_transfer(transfer_id, (), stays_remote=True)
            return
        self._give_up(transfer_id, error)

    async def _found_another(self, error: PeerError) -> bool:
        """A peer that was only started anew is as good as another one, as soon as it is described."""
        assert self._assignment is not None
        failed = self._assignment.peer
        self._leave_peer()
        if isinstance(error, PeerReplaced):
            await self._means.peers.look_again(failed, DESCRIBE_AGAIN_S)
            self._assign(self._means.peers.assign(self._request.prompt))
        else:
            self._assign(self._means.peers.assign(self._request.prompt, avoid=failed))
        if self._assignment is None:
            return False
        target = self._assignment.peer.target
        self._means.fallbacks.retry(self._request.request_id, failed.target, target, error)
        return True

    def _give_up(self, transfer_id: TransferId, error: PeerError) -> None:
        """Go on here with the very next token."""
        self._leave_peer()
        self._fall_back(error, "transfer_failed")
        streamed = (self._first.token_id,) if self._first is not None else ()
        self._rank.give_up_transfer(transfer_id, streamed)

    def _on_output(self, output: Output) -> TokenDelta:
        self._is_over = output.finish is not None or bool(output.error_name)
        delta = delta_of(output, self._placement)
        if self._first is None:
            return delta
        return replace(delta, num_cached_tokens=self._first.num_cached_tokens, prompt_logprobs=None)

    # ------------------------------------------------------------ end

    def _leave_peer(self) -> None:
        """Its prefill is done, or nobody waits for it: it no longer counts as the peer's load."""
        if self._assignment is not None:
            self._means.peers.unassign(self._assignment)
            self._assignment = None

    async def _close(self) -> None:
        """Both nodes forget the request, whatever it was doing."""
        self._leave_peer()
        # An answer that the first token ended still has KV on its way: the rank is told to let go of it.
        is_over_at_rank = self._is_over and not (self._first is not None and self._first.finish is not None)
        self._rank.close(self._request.request_id, is_over=is_over_at_rank)
        await self._end_handoff()

    async def _end_handoff(self) -> None:
        self._transfer_id = None
        if self._handoff is not None:
            self._handoff.cancel()
            with suppress(asyncio.CancelledError):
                await self._handoff
