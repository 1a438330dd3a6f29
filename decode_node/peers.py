"""The prefill nodes a decode node may use: found, compared, connected, watched, and set aside while they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import uniform

from decode_node import choice
from decode_node.choice import Candidate
from decode_node.health import PeerHealth
from decode_node.links import Links
from decode_node.pairing import pair
from decode_node.peer import Peer, PeerState, make_peer
from decode_node.peer_sources import PeerSources
from decode_node.requirements import Requirements
from decode_node.stranger import what_it_is
from pdserve.engine.messages import FromTransport
from pdserve.engine.prefix_memory import prefix_hashes
from pdserve.engine.ranks import Ranks
from pdserve.errors import PeerError, PeerMismatch
from pdserve.kv.layout import PAIRING_REMEDY
from pdserve.rpc.handoff import Description

log = logging.getLogger(__name__)

# How often a ready peer is asked whether it is still the same one, and what it has on its hands.
CHECK_S = 5.0
# Prompts that came before would be computed here, though their prefill node is there.
FIRST_LOOK_S = 3.0
# A peer that fails is left alone for this long, then for twice as long; a connection that comes back ends the wait.
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 5.0
# So that a hundred decode nodes do not return to a peer at the same moment: each waits for this share or more.
JITTER = 0.5


@dataclass(frozen=True, slots=True)
class Assignment:
    """A prompt is a peer's to prefill. num_tokens: that it probably has to compute."""

    peer: Peer
    num_tokens: int


class PeerTable:
    """Belongs to the front's event loop; `watch` runs for as long as the rank does."""

    def __init__(
        self, entries: Iterable[str], mine: Requirements, ranks: Ranks, max_message_bytes: int, incarnation: str
    ) -> None:
        """entries: as given to --prefill-peers, checked. incarnation: of this node."""
        self._mine = mine
        self._max_message_bytes = max_message_bytes
        self._incarnation = incarnation
        self._sources = PeerSources(entries)
        self._links = Links(ranks, self._on_lost)
        self._by_incarnation: dict[str, Peer] = {}
        self._by_target: dict[str, Peer] = {}
        self._watchers: dict[Peer, asyncio.Task[None]] = {}
        self._set_targets(self._sources.static)

    # ------------------------------------------------------------ choice

    @property
    def peers(self) -> list[Peer]:
        """Those that may be given prompts, now or when they are ready."""
        return [peer for peer in self._by_target.values() if not peer.is_leaving]

    def assign(self, prompt: Sequence[int], *, avoid: Peer | None = None) -> Assignment | None:
        """The ready peer that is through with the prompt first, see `choice.choose`; None where none takes it.

        avoid: it failed with this prompt just now. Pair with `unassign`.
        """
        num_tokens = len(prompt)
        fit = [peer for peer in self.peers if peer.is_ready and num_tokens <= peer.max_prompt_tokens]
        fit = [peer for peer in fit if peer is not avoid]
        if not fit:
            return None
        hashes = prefix_hashes(prompt, self._mine.fingerprint.block_size)
        known = [peer.prefixes.num_known(hashes) * self._mine.fingerprint.block_size for peer in fit]
        number = choice.choose(
            [
                Candidate(peer.num_queued_tokens, num_known, peer.has_room(num_tokens))
                for peer, num_known in zip(fit, known, strict=True)
            ]
        )
        peer = fit[number]
        peer.prefixes.remember(hashes)
        assignment = Assignment(peer, num_tokens - known[number])
        peer.num_outstanding_tokens += assignment.num_tokens
        return assignment

    def unassign(self, assignment: Assignment) -> None:
        """Its prefill is done, or nobody waits for it."""
        assignment.peer.num_outstanding_tokens -= assignment.num_tokens

    @property
    def num_ready(self) -> int:
        """Peers that may be chosen now."""
        return sum(peer.is_ready for peer in self.peers)

    @property
    def num_outstanding_tokens(self) -> int:
        """Prompt tokens that peers are to compute and have not drawn a first token from."""
        return sum(peer.num_outstanding_tokens for peer in self._by_target.values())

    def why_none(self, num_tokens: int) -> PeerError:
        """Why no peer can be had for a prompt this long."""
        if not self._sources.names:
            return PeerError("no prefill node is configured: set --prefill-peers")
        if not self.peers:
            return PeerError(f"no prefill node is known: {self._sources.names} names none")
        said = "; ".join(f"{peer.target}: {peer.why_not(num_tokens)}" for peer in self.peers)
        if any(peer.state is PeerState.MISMATCHED for peer in self.peers):
            return PeerMismatch(f"no prefill node can be used: {said}")
        return PeerError(f"no prefill node can be reached: {said}")

    async def first_look(self) -> None:
        """Returns when every peer that is known by now was asked who it is, ready or not, or after FIRST_LOOK_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                for peer in self.peers:
                    await peer.looked_at.wait()

    async def look_again(self, peer: Peer, limit_s: float) -> None:
        """Returns when the peer was asked who it is now, ready or not, or after limit_s seconds."""
        peer.ask_again("it was started anew")
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await peer.looked_at.wait()

    # ------------------------------------------------------------ which there are

    def _set_targets(self, targets: Sequence[str]) -> None:
        """New ones are connected; removed ones get no new prompt, and are dropped when their handoffs have ended."""
        for target in targets:
            peer = self._by_target.get(target)
            if peer is None:
                self._by_target[target] = make_peer(target, self._max_message_bytes)
            elif peer.is_leaving:
                peer.is_leaving = False
                log.info("prefill node %s is back in the list", target)
        for target in self._by_target.keys() - set(targets):
            if not self._by_target[target].is_leaving:
                self._by_target[target].is_leaving = True
                log.info("prefill node %s left the list: it finishes what it has", target)

    async def watch(self) -> None:
        """Keep every peer's state true, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._watch_new(group)
                group.create_task(self._sources.watch(lambda targets: self._on_targets(group, targets)))
                await asyncio.Event().wait()  # where there are no peers, too
        finally:
            for peer in self._by_target.values():
                await peer.channel.close()

    def _on_targets(self, group: asyncio.TaskGroup, targets: Sequence[str]) -> None:
        self._set_targets(targets)
        self._watch_new(group)

    def _watch_new(self, group: asyncio.TaskGroup) -> None:
        for peer in self._by_target.values():
            if peer.is_leaving:
                peer.news.set()  # wakes its watcher, which sees to its end
            elif peer not in self._watchers:
                self._watchers[peer] = group.create_task(self._watch_peer(peer))

    async def _watch_peer(self, peer: Peer) -> None:
        """Until it has left and is idle."""
        while not (peer.is_leaving and await self._is_gone(peer)):
            try:
                await self._follow(peer)
            except PeerError as error:
                self._set_aside(peer, error)
                await asyncio.sleep(FIRST_BACKOFF_S * uniform(JITTER, 1))
                backoff_s = _backoff_s(peer.num_failures)
                await (asyncio.sleep(backoff_s) if peer.is_reachable else peer.until_reachable(backoff_s))
                peer.num_failures += 1

    async def _is_gone(self, peer: Peer) -> bool:
        """False if it was named again before its last handoff had ended."""
        await peer.is_idle.wait()
        if not peer.is_leaving:
            return False
        self._end_life(peer)
        del self._by_target[peer.target], self._watchers[peer]
        await peer.channel.close()
        log.info("prefill node %s is dropped", peer.target)
        return True

    # ------------------------------------------------------------ one peer

    async def _follow(self, peer: Peer) -> None:
        """Returns when it has left. Raises PeerError when it cannot be used, now or any longer."""
        health = PeerHealth(peer.channel, peer.news)
        deaf = asyncio.create_task(health.watch())
        try:
            while not deaf.done() and not peer.is_leaving:
                peer.news.clear()
                if peer.must_rest:
                    peer.must_rest = False
                    raise PeerError(f"{peer.num_failures} calls to it in a row failed")
                if health.is_serving:
                    await self._make_ready(peer)
                elif not health.has_service:
                    self._set_aside(peer, await what_it_is(peer.channel, self._incarnation))
                elif health.is_serving is False:
                    self._set_aside(peer, PeerError("it is not serving: it starts, drains, or has lost its rank"))
                await self._wait_for_news(peer, deaf)
            if deaf.done():
                raise deaf.result()
        finally:
            deaf.cancel()

    async def _wait_for_news(self, peer: Peer, deaf: asyncio.Task[PeerError]) -> None:
        news = asyncio.create_task(peer.news.wait())
        try:
            done, _ = await asyncio.wait([deaf, news], timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        if not done and peer.is_ready:
            peer.succeeded()

    async def _make_ready(self, peer: Peer) -> None:
        description = await peer.describe()
        # Looked at only now: the peer may have been lost while it was asked.
        if peer.description is not None and peer.description.incarnation != description.incarnation:
            self._end_life(peer)
        if differences := self._mine.differences(description):
            raise PeerMismatch(f"{'; '.join(differences)}: {PAIRING_REMEDY}")
        if is_new := peer.description is None:
            await self._connect(peer, description)
        if is_new or peer.is_loss_told:
            what = "usable again" if peer.was_ready else "ready"
            log.info("prefill node %s is %s (incarnation %s)", peer.target, what, description.incarnation)
        self._wait_as_long_as_it_takes(peer, description.longest_chunk_s)
        peer.state, peer.was_ready, peer.is_loss_told = PeerState.READY, True, False
        peer.looked_at.set()

    def _wait_as_long_as_it_takes(self, peer: Peer, longest_chunk_s: float) -> None:
        """A peer whose chunks take long, as on a busy machine, is no worse than none; said once in its life."""
        peer.longest_chunk_s = longest_chunk_s
        limit_s = self._mine.no_progress_s(longest_chunk_s)
        if limit_s > self._mine.transfer_timeout_s and not peer.is_patience_told:
            peer.is_patience_told = True
            log.warning(
                "prefill node %s takes up to %.3g s for a chunk: it may be without progress for %.3g s, "
                "and not --transfer-timeout-s %g, as long as that is so; lower --chunked-prefill-size there",
                *(peer.target, longest_chunk_s, limit_s, self._mine.transfer_timeout_s),
            )

    async def _connect(self, peer: Peer, description: Description) -> None:
        if (other := self._by_incarnation.get(description.incarnation)) is not None:
            raise PeerError(f"it is the node that is used as {other.target}")
        pairing = pair(self._mine.fingerprint, description)
        peer.begin_life(description, pairing)
        self._by_incarnation[description.incarnation] = peer
        try:
            await self._links.connect(description, pairing)
        except PeerError as error:
            raise PeerError(f"its memory cannot be read: {error.message}") from None

    def _end_life(self, peer: Peer) -> None:
        if peer.description is not None:
            self._by_incarnation.pop(peer.description.incarnation, None)
            self._links.drop(peer.description.incarnation)
            peer.description = None

    def _on_lost(self, incarnation: str) -> None:
        """One rank of it cannot be read by one of ours: the peer is made ready anew, with all of its links."""
        peer = self._by_incarnation.get(incarnation)
        if peer is not None:
            self._end_life(peer)
            peer.doubt()

    def _set_aside(self, peer: Peer, error: PeerError) -> None:
        state = PeerState.MISMATCHED if isinstance(error, PeerMismatch) else PeerState.UNREACHABLE
        if (peer.state, peer.reason) != (state, error.message):
            # Nodes start in any order: one that was never there is waited for. One that is lost, or will never fit, is
            # news.
            is_awaited = not peer.was_ready and state is not PeerState.MISMATCHED
            level = logging.INFO if is_awaited else logging.WARNING
            log.log(level, "prefill node %s is not usable: %s", peer.target, error.message)
            peer.is_loss_told = True
        peer.state, peer.reason = state, error.message
        peer.looked_at.set()
        self._sources.look_again()

    # ------------------------------------------------------------ transport

    def on_transport(self, place: int, message: FromTransport) -> None:
        """What the transport of the process at `place` among all of ours says of a peer."""
        self._links.on_transport(place, message)


def _backoff_s(num_failures: int) -> float:
    return min(FIRST_BACKOFF_S * 2.0 ** min(num_failures, 10), MAX_BACKOFF_S) * uniform(JITTER, 1)
