"""The handoffs under way at a decode node, and what the requests they are for hear of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from decode_node.handoff import FromPart, FromPull, Handoff
from decode_node.peer import Peer
from decode_node.requirements import Requirements
from pdserve.engine.front import Inbox, Rank
from pdserve.engine.messages import PullFinished, Reserved
from pdserve.errors import PeerBusy, PeerError, PeerReplaced
from pdserve.request import TokenRequest, TransferId
from pdserve.rpc.handoff import FirstToken, RequestKey, Start

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptPrefilled:
    """Into the request's inbox: the peer drew the first token."""

    transfer_id: TransferId
    first: FirstToken


@dataclass(frozen=True, slots=True)
class HandoffFailed:
    """Into the request's inbox: its KV will not come."""

    transfer_id: TransferId
    error: PeerError


class Handoffs:
    """The handoffs under way at this node, by transfer. incarnation: of this node, another one after each start."""

    def __init__(self, mine: Requirements, incarnation: str) -> None:
        self._mine = mine
        self._fingerprint = mine.fingerprint
        self._incarnation = incarnation
        self._live: dict[tuple[int, TransferId], Handoff] = {}  # of each rank
        self.counters: Counter[str] = Counter()

    def start(
        self,
        peer: Peer,
        rank: Rank,
        transfer: Reserved,
        request: TokenRequest,
        inbox: Inbox,
        *,
        attempt: int,
        time_left_s: float | None,
    ) -> asyncio.Task[None]:
        """Begin; PromptPrefilled and HandoffFailed go into the request's inbox. Cancel the task to give it up."""
        handoff = Handoff(
            peer,
            rank,
            transfer.transfer_id,
            lambda first: inbox.put(PromptPrefilled(transfer.transfer_id, first)),
            lambda: self._mine.no_progress_s(peer.longest_chunk_s),
            self._fingerprint.vocab_size,
        )
        self._live[rank.number, transfer.transfer_id] = handoff
        assert peer.description is not None
        start = Start(
            incarnation=peer.description.incarnation,
            request_key=RequestKey(self._incarnation, inbox.rank_id, attempt),
            weights_version=peer.description.weights_version,
            prompt=request.prompt,
            sampling=request.sampling,
            num_cached_tokens=transfer.num_cached_tokens,
            fingerprint=self._fingerprint,
            time_left_s=time_left_s,
            priority=request.priority,
        )
        return asyncio.create_task(self._run(handoff, start, peer, rank, transfer, inbox))

    async def _run(
        self, handoff: Handoff, start: Start, peer: Peer, rank: Rank, transfer: Reserved, inbox: Inbox
    ) -> None:
        try:
            await handoff.run(start)
            peer.succeeded()
        except PeerError as error:
            # Told to people where its consequences are counted, which is rate limited.
            log.debug("handoff of %s to %s failed: %s", transfer.request_id, peer.target, error.message)
            if not isinstance(error, PeerBusy | PeerReplaced):
                peer.doubt()
            inbox.put(HandoffFailed(transfer.transfer_id, error))
        except Exception as error:  # a fault of ours; the request ends with it rather than never
            inbox.put(error)
        finally:
            self._live.pop((rank.number, transfer.transfer_id), None)

    def on_transport(self, rank: int, part: int, message: FromPull) -> None:
        """What the transport of a process of a rank says goes to the handoff of its transfer."""
        if isinstance(message, PullFinished):
            self._count(part, message)
        handoff = self._live.get((rank, message.transfer_id))
        if handoff is not None:
            handoff.put(FromPart(part, message))

    def _count(self, part: int, pull: PullFinished) -> None:
        """A transfer is one, however many processes read for it; what they read is summed, and the time they took."""
        self.counters["kv_transfers_total"] += part == 0
        self.counters["kv_bytes_total"] += pull.num_bytes
        self.counters["kv_reads_total"] += pull.num_reads
        self.counters["kv_descriptors_total"] += pull.num_descriptors
        self.counters["kv_read_microseconds_total"] += round(pull.elapsed_s * 1e6)
