"""Making room: a request's KV goes to the host tier, its slot and blocks to somebody else, and nothing is recomputed.

Only in a round that schedules no prefill, for a decode that lacks its next block or an eligible prefill that lacks
its blocks. Victims: incomplete prefills first, the largest; then the decode that frees most blocks, of these the one
with the fewest tokens drawn. If the victim is itself who lacks blocks, they go to the next who does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdserve.errors import NotReady
from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.admission import Admission
from pdserve.scheduler.block_pool import BlockPool
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.draft import Draft
from pdserve.scheduler.plan import RequestFailed, TakenBack
from pdserve.scheduler.residents import Residents
from pdserve.scheduler.state import State, Tracked, TransferState
from pdserve.scheduler.tiers import HostTier


class Retraction:
    """Shares the residents, the pool and the host tier with the scheduler that owns it."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        residents: Residents,
        host: HostTier,
        admission: Admission,
        counters: Counters,
    ) -> None:
        self._config = config
        self._pool = pool
        self._residents = residents
        self._host = host
        self._admission = admission
        self._counters = counters

    # ------------------------------------------------------------ for a prefill

    def admit_blocked(self, draft: Draft) -> None:
        """Give the first prompt that lacks blocks those of victims. Nobody is retracted where that would not do.

        A prompt never costs another request its answer: without room for images it waits for answers to end. Nor does
        it take the place of who was retracted before, or a steady stream of prompts would leave that one no round.
        """
        if not self._host.pool.num_blocks or self._host.num_pinned:
            return
        request = next((r for r in draft.blocked_prefills if self._admission.has_room(r, draft)), None)
        if request is None:
            return
        victims = (victim for victim in self._victims() if victim.num_computed_at_restore is None)
        chosen = self._enough(victims, request)
        if not chosen:
            return
        for victim in chosen:
            self._retract(victim, draft)
        is_admitted = self._admission.admit(request, draft)
        assert is_admitted, f"{request.request_id} has no room in spite of {len(chosen)} victims"

    # ------------------------------------------------------------ for a decode

    def grow_blocked(self, draft: Draft) -> None:
        """Give decodes that lack their next block those of victims, until all that are left run or no victim is."""
        while draft.blocked_decodes and not self._host.num_pinned:
            victim = next(filter(self._has_run, self._victims()), None)
            if victim is None:
                return
            others = [request for request in draft.blocked_decodes if request is not victim]
            if not others:
                self._redirect(victim, draft)
                return
            self._retract(victim, draft)
            draft.blocked_decodes = [request for request in others if not self._admission.try_decode(request, draft)]

    def _has_run(self, request: Tracked) -> bool:
        """Since it was restored, if it was. Else two answers could take each other's blocks and neither get on."""
        return request.num_computed != request.num_computed_at_restore

    def _redirect(self, victim: Tracked, draft: Draft) -> None:
        """The victim alone lacks a block: its blocks go to the first prompt they suffice for, else it keeps them.

        While others decode it just waits: they end, and so free blocks, without anybody being moved.
        """
        if draft.decode:
            return
        for request in self._admission.candidates():
            may_start = self._admission.has_room(request, draft) and self._residents.has_free_slot
            if may_start and self._enough([victim], request):
                self._retract(victim, draft)
                draft.blocked_decodes = []
                self._admission.admit(request, draft)
                return

    # ------------------------------------------------------------ victims

    def _victims(self) -> Iterator[Tracked]:
        """Who could be retracted, best first. Images that would not fit the host are left out."""
        if not self._host.pool.num_available:
            return iter(())
        prefills = [request for request in self._residents.prefilling if request.route.may_be_retracted]
        decodes = [request for request in self._residents.decoding if request.route.may_be_retracted]
        prefills.sort(key=lambda request: (-len(request.tokens), request.order))
        decodes.sort(key=lambda request: (-self._num_freed(request), request.num_output_tokens, request.order))
        return (request for request in prefills + decodes if self._num_freed(request) and self._has_room_for(request))

    def _num_freed(self, victim: Tracked) -> int:
        return self._pool.num_sole_references(victim.blocks)

    def _has_room_for(self, victim: Tracked) -> bool:
        return self._host.fits_image(self._image_blocks(victim), self._image_hashes(victim))

    def _image_blocks(self, request: Tracked) -> list[BlockId]:
        """The blocks of its computed tokens."""
        return request.blocks[: -(-request.num_computed // self._config.block_size)]

    def _image_hashes(self, request: Tracked) -> list[BlockHash]:
        """Of those blocks, as far as they are full and published."""
        return request.hashes[: request.num_published]

    def _enough(self, victims: Iterable[Tracked], request: Tracked) -> list[Tracked]:
        """The first of `victims` that free what `request` lacks, as far as the host takes their images; else nobody.

        A block that the request shares with a victim is not freed for it: it counts as a hit already. One that a victim
        would need for its next token is.
        """
        num_lacking = self._admission.num_blocks_lacking(request, self._admission.num_blocks_for_decodes())
        hits = set(self._admission.hits_on_device(request))
        num_host_blocks = self._host.pool.num_available
        chosen: list[Tracked] = []
        for victim in victims:
            num_lacking -= self._pool.num_sole_references(block for block in victim.blocks if block not in hits)
            num_lacking -= self._admission.lacks_block(victim)
            num_host_blocks -= len(self._image_blocks(victim))
            if num_host_blocks < 0:
                break
            chosen.append(victim)
            if num_lacking <= 0:
                return chosen
        return []

    def _retract(self, request: Tracked, draft: Draft) -> None:
        """Its blocks can be granted in this very round: the copy of its image is made before the forward."""
        request.image, copy = self._host.image(self._image_blocks(request), self._image_hashes(request))
        if copy is not None:
            self._host.wait_for(copy, request.request_id)
            request.job_id = copy.copy_id
            draft.copies.append(copy)
        draft.drop_decode(request.request_id)
        draft.num_owed = None
        request.resumes_decoding = request.state is State.DECODING
        self._residents.retract(request)
        self._pool.release(request.blocks)
        request.blocks = []
        self._counters.retractions += 1

    # ------------------------------------------------------------ without victims

    def taken_back(self) -> tuple[TakenBack, ...]:
        """The newest reservation that only waits in a peer's queue, unless blocks are coming free anyway."""
        transfers = self._residents.transfers.values()
        if any(transfer.state is TransferState.DRAINING for transfer in transfers):
            return ()
        waiting = [transfer for transfer in transfers if not transfer.is_accepted]
        newest = max(waiting, key=lambda t: self._residents.by_id[t.request_id].order, default=None)
        return (TakenBack(newest.request_id, newest.transfer_id),) if newest else ()

    def given_up(self, draft: Draft) -> tuple[RequestFailed, ...]:
        """The newest blocked decode, where nothing else will free any blocks."""
        if self._will_free_blocks:
            return ()
        error = NotReady(
            f"the KV cache is full: no block of {self._pool.num_blocks} is free, none of "
            f"{len(self._residents.decoding)} answers can grow, and the host tier has no room for an image; this "
            "request is the newest of them. Raise --host-kv-gb or --num-kv-blocks, or lower --max-num-seqs"
        )
        return (RequestFailed(draft.blocked_decodes[-1].request_id, error),)

    @property
    def _will_free_blocks(self) -> bool:
        """A transfer or a lease holds blocks, a job below the device holds room for images; all end by themselves."""
        residents = self._residents
        return bool(residents.transfers) or residents.num_leases > 0 or self._host.num_jobs > 0
