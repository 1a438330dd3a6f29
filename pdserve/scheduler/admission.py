"""Grants: who gets a chunk, a next token, a reservation, or its blocks back in this round."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.request import BlockHash, BlockId, Side
from pdserve.scheduler.block_pool import BlockPool
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.draft import Draft
from pdserve.scheduler.plan import Reservation, Row, SlotStart
from pdserve.scheduler.prefix_cache import extend_hashes
from pdserve.scheduler.residents import Residents
from pdserve.scheduler.state import Tracked, Transfer
from pdserve.scheduler.storage_plan import Fetch
from pdserve.scheduler.tiers import HostTier

# How many prompts that cannot be admitted a round looks at. Keeps its cost flat in the queue's length.
MAX_MISSED = 32
# How often others may overtake a new prompt that lacks blocks; then nothing new is admitted before it.
MAX_PASSED_OVER = 64


def everyone(request: Tracked) -> bool:
    """A choice among prefills that leaves nobody out."""
    return True


class Admission:
    """Fills drafts from the residents, the pool and the host tier, which it shares with the scheduler that owns it."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, residents: Residents, host: HostTier, counters: Counters
    ) -> None:
        self._config = config
        self._pool = pool
        self._residents = residents
        self._host = host
        self._counters = counters

    # ------------------------------------------------------------ eligibility

    @property
    def is_below_watermark(self) -> bool:
        """Occupancy is at most the watermark, compared in integers; without a watermark always.

        What only a copy under way still holds is nobody's: it does not count.
        """
        watermark = self._config.prefill_watermark
        if watermark is None:
            return True
        return 10 * (self._pool.num_held - self._host.num_pinned) <= watermark * self._pool.num_blocks

    def may_extend(self, request: Tracked, draft: Draft) -> bool:
        return draft.allow_prefill or not request.route.is_gated

    def may_admit(self, request: Tracked, draft: Draft) -> bool:
        return not request.route.is_gated or (draft.allow_prefill and self.is_below_watermark)

    def candidates(self) -> list[Tracked]:
        """The head of the queue: as many as could start, and those looked at in vain before them."""
        return self._residents.first_waiting(self._residents.num_free_slots + MAX_MISSED)

    # ------------------------------------------------------------ prefills

    def add_prefills(self, draft: Draft, may_run: Callable[[Tracked], bool] = everyone) -> None:
        """Resident chunks, then new prompts, in submission order; only those that `may_run`."""
        for request in self._residents.prefilling:
            if draft.is_full or draft.is_sealed:
                break
            if self.may_extend(request, draft) and may_run(request):
                self.add_chunk(request, draft)
        if self._residents.has_free_slot and self._residents.has_waiting:
            self._add_new(draft, may_run)

    def _add_new(self, draft: Draft, may_run: Callable[[Tracked], bool]) -> None:
        """Admit from the queue. Who lacks blocks is passed over by those behind, in MAX_PASSED_OVER rounds at most."""
        num_overtaken = num_missed = 0
        blocked: list[Tracked] = []
        for request in self.candidates():
            if not self._residents.has_free_slot or num_missed == MAX_MISSED:
                break
            may_try = self.has_room(request, draft) and may_run(request)
            if may_try and self.admit(request, draft):
                num_overtaken = len(blocked)
                continue
            num_missed += 1
            if may_try and self.has_room(request, draft):
                blocked.append(request)
            if request.num_passed_over >= MAX_PASSED_OVER and self.may_admit(request, draft):
                break
        draft.blocked_prefills += [request for request in blocked if request.route.prefill is Side.LOCAL]
        for request in blocked[:num_overtaken]:
            request.num_passed_over += 1

    def has_room(self, request: Tracked, draft: Draft) -> bool:
        """Permission, and room in this round or on the wire: all that is left to find is blocks."""
        if draft.is_sealed_for_new:
            return False
        if request.route.prefill is Side.REMOTE:
            return self._residents.num_receiving < self._config.transfer_limit
        is_looked_up = request.is_looked_up or not self._host.has_storage
        return not draft.is_full and not draft.is_sealed and is_looked_up and self.may_admit(request, draft)

    def admit(self, request: Tracked, draft: Draft) -> bool:
        """Take it out of the queue, if there are blocks for it."""
        if request.route.prefill is Side.REMOTE:
            return self._reserve(request, draft)
        return self._begin(request, draft)

    def _begin(self, request: Tracked, draft: Draft) -> bool:
        """Blocks and a slot for a new prompt, and its first chunk. A prompt that has no chunk now seals the round."""
        hits = self._hits(request)
        num_cached = sum(map(len, hits)) * self._config.block_size
        if self._chunk_end(num_cached, len(request.tokens), draft.tokens_left) == num_cached:
            draft.is_sealed = True
            return False
        if not self._take_blocks(request, hits, draft):
            return False
        request.num_announced = request.peer_cached_tokens
        self._residents.admit(request)
        self.add_chunk(request, draft)
        return True

    def add_chunk(self, request: Tracked, draft: Draft) -> None:
        start = request.num_computed
        end = self._chunk_end(start, len(request.tokens), draft.tokens_left)
        if end < len(request.tokens):
            draft.is_sealed = True
        if end > start:
            draft.prefill.append(self.row(request, start, end, draft))
            draft.tokens_left -= end - start
            draft.rows_left -= 1

    def _chunk_end(self, start: int, end: int, budget: int) -> int:
        """Where a chunk from `start` ends: at the prompt's end, or at the last block boundary the budget reaches."""
        if end - start <= budget:
            return end
        return start + budget // self._config.block_size * self._config.block_size

    def _reserve(self, request: Tracked, draft: Draft) -> bool:
        """Blocks and a slot for a prompt that a peer prefills."""
        if not self._take_blocks(request, self._hits(request), draft):
            return False
        size = self._config.block_size
        transfer_id = self._residents.reserve(request)
        destination = tuple(request.blocks[request.num_computed // size : -(-request.num_prompt_tokens // size)])
        self._residents.transfers[transfer_id] = Transfer(transfer_id, request.request_id, destination)
        draft.reservations.append(
            Reservation(
                request.request_id, transfer_id, request.num_cached_tokens, request.num_prompt_tokens, destination
            )
        )
        return True

    def row(self, request: Tracked, start: int, end: int, draft: Draft) -> Row:
        """The request's row of this round; the first since it got its slot starts the slot."""
        assert request.slot is not None
        new_blocks: tuple[BlockId, ...] = ()
        if request.num_told_blocks < len(request.blocks):
            if request.num_told_blocks == 0:
                output = tuple(request.tokens[request.num_prompt_tokens :])
                draft.starts.append(SlotStart(request.request_id, request.slot, output, request.num_cached_tokens))
            new_blocks = tuple(request.blocks[request.num_told_blocks :])
            request.num_told_blocks = len(request.blocks)
        return Row(request.request_id, request.slot, start, end, new_blocks, end == len(request.tokens))

    # ------------------------------------------------------------ decodes

    def try_decode(self, request: Tracked, draft: Draft) -> bool:
        """The request's next token, with one more block where it needs one; False if there is none."""
        end = len(request.tokens)
        if end > len(request.blocks) * self._config.block_size:
            blocks = self._pool.allocate(1)
            if blocks is None:
                return False
            request.blocks += blocks
            draft.num_owed = None
        draft.decode.append(self.row(request, end - 1, end, draft))
        draft.tokens_left -= 1
        draft.rows_left -= 1
        return True

    # ------------------------------------------------------------ restores

    def add_restore(self, draft: Draft) -> None:
        """Bring the longest retracted request back, if its image has landed and there is room; it runs from next round.

        One that lacks blocks seals the round for new prompts, which must not take what it waits for.
        """
        for request in self._residents.retracted:
            if not self._residents.has_free_slot:
                return
            if request.job_id is not None:
                continue
            # The last block of an image is always copied: a restore is over when its copy is.
            kept = self._pool.longest_prefix(request.hashes[: len(request.image) - 1])
            blocks = self._allocate_behind(kept, self._num_blocks_wanted(request), draft)
            if blocks is None:
                draft.is_sealed_for_new = True
                return
            request.blocks = blocks
            copy = self._host.load(request.image[len(kept) :], blocks[len(kept) : len(request.image)])
            self._host.wait_for(copy, request.request_id)
            request.job_id = copy.copy_id
            request.num_published = len(kept)
            request.num_told_blocks = 0
            request.num_computed_at_restore = request.num_computed
            self._residents.restore(request)
            draft.copies.append(copy)
            self._counters.restores += 1
            return

    # ------------------------------------------------------------ blocks

    def num_blocks_for_decodes(self) -> int:
        """Blocks that running answers need before anything new may have one."""
        return sum(map(self.lacks_block, self._residents.decoding))

    def lacks_block(self, request: Tracked) -> bool:
        """Its next token has no place in its blocks."""
        return len(request.tokens) > len(request.blocks) * self._config.block_size

    def _hits(self, request: Tracked) -> tuple[list[BlockId], list[BlockId]]:
        """Device blocks, then host blocks, of a prefix of the known tokens; never the last, whose logits are needed."""
        hashes = self._hashes(request)
        on_device = self._pool.longest_prefix(hashes)
        return on_device, self._host.pool.longest_prefix(hashes[len(on_device) :])

    def _hashes(self, request: Tracked) -> list[BlockHash]:
        """Of the full blocks whose KV it may take from a cache."""
        if not self._config.prefix_caching or not request.reads_prefix_cache:
            return []
        num_blocks = (len(request.tokens) - 1) // self._config.block_size
        extend_hashes(request.hashes, request.tokens, num_blocks, self._config.block_size)
        return request.hashes[:num_blocks]

    def _num_blocks_wanted(self, request: Tracked) -> int:
        """For the known tokens, and headroom for the answer."""
        num_tokens = len(request.tokens)
        if request.route.reserves_answer:
            num_tokens += min(request.max_new_tokens - request.num_output_tokens, self._config.answer_headroom)
        return -(-num_tokens // self._config.block_size)

    def num_blocks_lacking(self, request: Tracked, num_owed: int) -> int:
        """Blocks that have to come free before the new prompt can have all it wants.

        num_owed: of `num_blocks_for_decodes`, counted once for many prompts.
        """
        on_device = self.hits_on_device(request)
        num_unheld = sum(not self._pool.is_held(block) for block in on_device)
        num_available = self._pool.num_available - num_unheld - num_owed
        return self._num_blocks_wanted(request) - len(on_device) - num_available

    def hits_on_device(self, request: Tracked) -> list[BlockId]:
        return self._hits(request)[0]

    def _allocate_behind(self, kept: list[BlockId], num_blocks: int, draft: Draft) -> list[BlockId] | None:
        """A table of num_blocks that starts with `kept`, and holds all of them; nothing if too few are left.

        Running answers come before anything new: their next blocks are left to them. Counted once for many candidates.
        """
        if draft.num_owed is None:
            draft.num_owed = self.num_blocks_for_decodes()
        self._pool.hold(kept)
        blocks = self._pool.allocate(num_blocks - len(kept), leaving=draft.num_owed)
        if blocks is None:
            self._pool.release(kept)
            return None
        return kept + blocks

    def _take_blocks(self, request: Tracked, hits: tuple[list[BlockId], list[BlockId]], draft: Draft) -> bool:
        """Hold the hits, allocate the rest, load what the host has. All or nothing."""
        on_device, on_host = hits
        blocks = self._allocate_behind(on_device, self._num_blocks_wanted(request), draft)
        if blocks is None:
            return False
        num_cached = len(on_device) + len(on_host)
        if on_host:
            draft.copies.append(self._host.load(on_host, blocks[len(on_device) : num_cached]))
        request.blocks = blocks
        request.num_computed = request.num_cached_tokens = num_cached * self._config.block_size
        request.num_published = len(on_device)
        self._counters.prefix_queried_tokens += len(request.tokens)
        self._counters.prefix_hit_tokens += request.num_cached_tokens
        self._counters.host_hit_tokens += len(on_host) * self._config.block_size
        return True

    # ------------------------------------------------------------ storage

    def start_fetches(self) -> list[Fetch]:
        """Look up in storage what the head of the queue misses above it; such a prompt leaves the queue meanwhile."""
        fetches: list[Fetch] = []
        for request in self.candidates() if self._host.has_storage else ():
            if request.is_looked_up or request.route.prefill is Side.REMOTE:
                continue
            if not self._host.may_fetch:
                break
            hashes = self._hashes(request)
            num_known = sum(map(len, self._hits(request)))
            fetch = self._host.fetch(request.request_id, hashes[num_known:])
            request.is_looked_up = True
            if fetch is not None:
                request.job_id = fetch.fetch_id
                self._residents.start_fetch(request)
                fetches.append(fetch)
                self._counters.storage_fetches += 1
        return fetches

    # ------------------------------------------------------------ what waits, for the fill condition

    def waiting_tokens(self, enough: int) -> int:
        """Uncached tokens of new gated prompts that could start now, each at most a round's worth; `enough` at most."""
        total, num_slots = 0, self._residents.num_free_slots
        num_owed = self.num_blocks_for_decodes() if num_slots else 0
        for request in self.candidates():
            if num_slots == 0 or total >= enough:
                break
            if not request.route.is_gated or (self._host.has_storage and not request.is_looked_up):
                continue
            if self.num_blocks_lacking(request, num_owed) <= 0:
                num_slots -= 1
                num_cached = sum(map(len, self._hits(request))) * self._config.block_size
                total += min(len(request.tokens) - num_cached, self._config.max_scheduled_tokens)
        return min(total, enough)
