"""The decode node's token source: prompts are prefilled by a peer, or here where that is the better or the only way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from decode_node.handoff import HandoffFailed, Handoffs, PromptPrefilled
from decode_node.peers import Peer, PeerTable
from pdserve.config import DecodeFallback
from pdserve.engine.front import Inbox, Rank, delta_of
from pdserve.engine.messages import (
    FromTransport,
    Output,
    PullBroken,
    PullCommitted,
    PullFinished,
    ReservationTakenBack,
    Reserved,
)
from pdserve.errors import PdserveError, PeerError, PeerMismatch, TransferFailed
from pdserve.request import DECODE_ONLY, FUSED, RankLoad, RequestId, Route, TokenDelta, TokenRequest, TransferId
from pdserve.rpc.handoff import FirstToken

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandoffPolicy:
    """fallback: what happens when no peer can serve or a transfer failed. min_tokens: shorter prompts stay here."""

    fallback: DecodeFallback
    min_tokens: int


class RemotePrefillTokens:
    """A token source over one rank and its peers. Belongs to the front's event loop."""

    def __init__(self, rank: Rank, peers: PeerTable, handoffs: Handoffs, policy: HandoffPolicy) -> None:
        self._rank = rank
        self._peers = peers
        self._handoffs = handoffs
        self._policy = policy
        self._counters: Counter[str] = Counter(remote_prefills_total=0, decode_fallback_total=0, local_prefills_total=0)

    def on_transport(self, message: FromTransport) -> None:
        """A message of the transport thread goes to its handoff, or to the table of peers."""
        if isinstance(message, PullFinished | PullBroken | PullCommitted):
            self._handoffs.on_transport(message)
        else:
            self._peers.on_transport(message)

    async def stream(self, request: TokenRequest) -> AsyncIterator[TokenDelta]:
        """Tokens as they are drawn, the first one by the peer; closing the iterator aborts on both nodes."""
        answer = Answer(request, self._rank, self._peers, self._handoffs, self._policy, self._counters)
        async with aclosing(answer.deltas()) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: RequestId) -> bool:
        return self._rank.abort(request_id)

    async def loads(self, *, check_integrity: bool = False) -> list[RankLoad]:
        load = await self._rank.load(check_integrity=check_integrity)
        own = {
            **self._counters,
            **self._handoffs.counters,
            "num_ready_peers": self._peers.num_ready,
            "outstanding_prefill_tokens": self._peers.num_outstanding_tokens,
        }
        return [replace(load, counters={**load.counters, **own})]


class Answer:
    """One request on its way: where it is prefilled, and what its client has been sent."""

    def __init__(
        self,
        request: TokenRequest,
        rank: Rank,
        peers: PeerTable,
        handoffs: Handoffs,
        policy: HandoffPolicy,
        counters: Counter[str],
    ) -> None:
        self._request = request
        self._deadline = None if request.time_left_s is None else time.monotonic() + request.time_left_s
        self._rank = rank
        self._peers = peers
        self._handoffs = handoffs
        self._policy = policy
        self._counters = counters
        self._peer: Peer | None = None
        self._placement = ""
        self._handoff: asyncio.Task[None] | None = None
        self._num_attempts = 0
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
                        self._give_up(transfer_id, error)
                    case Output():
                        yield self._on_output(message)
                    case Exception():
                        raise message
        finally:
            await self._close()

    # ------------------------------------------------------------ where

    def _choose_route(self) -> Route:
        num_tokens = len(self._request.prompt)
        if num_tokens < self._policy.min_tokens:
            self._placement = "local;reason=short_prompt"
            self._counters["local_prefills_total"] += 1
            return FUSED
        if not self._choose_peer():
            return FUSED
        self._counters["remote_prefills_total"] += 1
        return DECODE_ONLY

    def _choose_peer(self) -> bool:
        """False where none can be had, and the prompt is prefilled here."""
        num_tokens = len(self._request.prompt)
        self._peer = self._peers.choose(num_tokens)
        if self._peer is None:
            self._fall_back(self._peers.why_none(num_tokens), "no_peer")
            return False
        self._placement = f"remote;peer={self._peer.target}"
        return True

    def _fall_back(self, error: PeerError, reason: str) -> None:
        """Prefill here, never silently. Raises `error` where the policy is to fail."""
        if self._policy.fallback is DecodeFallback.FAIL:
            raise error
        reason = "peer_mismatch" if isinstance(error, PeerMismatch) else reason
        self._placement = f"local;reason={reason}"
        self._counters["decode_fallback_total"] += 1
        self._counters[f"decode_fallback_total:{reason}"] += 1
        log.warning("prefilling %s locally (%s): %s", self._request.request_id, reason, error.message)

    # ------------------------------------------------------------ what comes

    def _start_handoff(self, reserved: Reserved, inbox: Inbox) -> None:
        """The peer was chosen before the request had its slot, and may be gone since: then it is another's turn."""
        if self._first is not None:  # the reservation before was taken back while its first token was on its way
            self._give_up(reserved.transfer_id, TransferFailed("the reservation was taken back"))
            return
        if self._peer is None or not self._peer.is_ready:
            self._leave_peer()
            if not self._choose_peer():
                self._rank.give_up_transfer(reserved.transfer_id, ())
                return
        assert self._peer is not None
        time_left_s = None if self._deadline is None else self._deadline - time.monotonic()
        self._handoff = self._handoffs.start(
            self._peer, reserved, self._request, inbox, attempt=self._num_attempts, time_left_s=time_left_s
        )
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

    def _leave_peer(self) -> None:
        """Its prefill is done, or nobody waits for it: it no longer counts as the peer's load."""
        if self._peer is not None:
            self._peer.outstanding_tokens -= len(self._request.prompt)
            self._peer = None

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
