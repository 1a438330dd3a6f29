"""The decode node's token source: prompts are prefilled by a peer, or here where that is the better or the only way."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from decode_node.answer import Answer, HandoffPolicy, Means
from decode_node.fallbacks import Fallbacks
from decode_node.handoff import FromPull
from decode_node.handoffs import Handoffs
from decode_node.peers import PeerTable
from pdserve.engine.messages import FromTransport
from pdserve.engine.ranks import Ranks
from pdserve.request import RankLoad, RequestId, TokenDelta, TokenRequest


class RemotePrefillTokens:
    """A token source over this node's ranks and its peers. Belongs to the front's event loop."""

    def __init__(self, ranks: Ranks, peers: PeerTable, handoffs: Handoffs, policy: HandoffPolicy) -> None:
        counters = Counter(remote_prefills_total=0, remote_prefill_retries_total=0, local_prefills_total=0)
        self._means = Means(ranks, peers, handoffs, policy, Fallbacks(), counters)
        for place, member in enumerate(ranks.members):
            member.on_transport = partial(self._on_transport, place)

    def _on_transport(self, place: int, message: FromTransport) -> None:
        """A message of the transport thread of the process at `place` goes to its handoff, or to the table of peers."""
        if isinstance(message, FromPull):
            self._means.handoffs.on_transport(*divmod(place, self._means.num_parts), message)
        else:
            self._means.peers.on_transport(place, message)

    async def stream(self, request: TokenRequest) -> AsyncIterator[TokenDelta]:
        """Tokens as they are drawn, the first one by the peer; closing the iterator aborts on both nodes."""
        async with aclosing(Answer(request, self._means).deltas()) as deltas:
            async for delta in deltas:
                yield delta

    async def abort(self, request_id: RequestId) -> bool:
        return self._means.ranks.abort(request_id)

    async def loads(self, *, check_integrity: bool = False) -> list[RankLoad]:
        means = self._means
        loads = await means.ranks.loads(check_integrity=check_integrity)
        own = {
            **means.counters,
            **means.fallbacks.counters,
            **means.handoffs.counters,
            "num_peers": len(means.peers.peers),
            "num_ready_peers": means.peers.num_ready,
            "outstanding_prefill_tokens": means.peers.num_outstanding_tokens,
        }
        # What is the node's own is told with its first rank, so that sums over ranks are right.
        return [replace(loads[0], counters={**loads[0].counters, **own}), *loads[1:]]
