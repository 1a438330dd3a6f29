"""Builds one round's plan: who gets tokens, blocks and slots, in what order."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.errors import NotReady
from pdserve.request import BlockId, Side
from pdserve.scheduler.block_pool import BlockPool
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.plan import PlanOptions, RequestFailed, Reservation, RoundPlan, Row, SlotStart, TakenBack
from pdserve.scheduler.prefix_cache import extend_hashes
from pdserve.scheduler.residents import Residents
from pdserve.scheduler.state import Tracked, Transfer, TransferState

# How far into the queue a round looks for prompts that fit. Keeps a round's cost flat in the queue's length.
MAX_CANDIDATES = 32
# How often others may overtake a new prompt that lacks blocks; then nothing new is admitted before it.
MAX_PASSED_OVER = 64


@dataclass(slots=True)
class Draft:
    """A plan in the making. A prefill that could not take all it wanted seals the round for prefills behind it.

    num_blocks_for_decodes: blocks that running answers need before anything new may have one.
    """

    tokens_left: int
    rows_left: int
    allow_prefill: bool
    starts: list[SlotStart] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    decode: list[Row] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    is_sealed: bool = False
    num_blocks_for_decodes: int = 0
    blocked_decodes: list[Tracked] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.tokens_left <= 0 or self.rows_left <= 0


class Planner:
    """Plans rounds over the residents and the pool, which it shares with the scheduler that owns it."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, residents: Residents, counters: Counters) -> None:
        self._config = config
        self._pool = pool
        self._residents = residents
        self._counters = counters

    def plan(self, round_id: int, options: PlanOptions) -> RoundPlan:
        draft = Draft(self._config.max_scheduled_tokens, self._config.max_batch_size, options.allow_prefill)
        if self._config.enable_mixed_batch:
            self._add_decodes(draft, self._prefill_reserve(draft))
            self._add_prefills(draft)
        else:
            self._add_prefills(draft)
            if not draft.prefill:
                self._add_decodes(draft, reserve=0)
        is_stuck = not draft.prefill and not draft.decode and bool(draft.blocked_decodes)
        return RoundPlan(
            round_id,
            tuple(draft.starts),
            tuple(draft.prefill),
            tuple(draft.decode),
            tuple(draft.reservations),
            failed=self._given_up(draft) if is_stuck else (),
            taken_back=self._taken_back() if is_stuck else (),
        )

    # ------------------------------------------------------------ eligibility

    @property
    def is_below_watermark(self) -> bool:
        """Occupancy is at most the watermark, compared in integers; without a watermark always."""
        watermark = self._config.prefill_watermark
        return watermark is None or 10 * self._pool.num_held <= watermark * self._pool.num_blocks

    def _may_extend(self, request: Tracked, draft: Draft) -> bool:
        return draft.allow_prefill or not request.route.is_gated

    def _may_admit(self, request: Tracked, draft: Draft) -> bool:
        return not request.route.is_gated or (draft.allow_prefill and self.is_below_watermark)

    def _prefill_reserve(self, draft: Draft) -> int:
        """Tokens that decodes of a mixed round leave free while a prefill could use them."""
        waits = any(self._may_extend(request, draft) for request in self._residents.prefilling) or (
            self._residents.has_free_slot
            and any(
                request.route.prefill is Side.LOCAL and self._may_admit(request, draft)
                for request in self._residents.first_waiting(MAX_CANDIDATES)
            )
        )
        return self._config.prefill_reserve if waits else 0

    # ------------------------------------------------------------ decodes

    def _add_decodes(self, draft: Draft, reserve: int) -> None:
        decode, size = draft.decode, self._config.block_size
        room = min(draft.tokens_left - reserve, draft.rows_left)
        for request in self._residents.decoding:
            if len(decode) >= room:
                break
            end = len(request.tokens)
            if end > len(request.blocks) * size and not self._grow(request):
                draft.blocked_decodes.append(request)
                continue
            decode.append(self._row(request, end - 1, end, draft))
        draft.tokens_left -= len(decode)
        draft.rows_left -= len(decode)

    def _grow(self, request: Tracked) -> bool:
        """One more block for the next token."""
        blocks = self._pool.allocate(1)
        if blocks is None:
            return False
        request.blocks += blocks
        return True

    def _row(self, request: Tracked, start: int, end: int, draft: Draft) -> Row:
        assert request.slot is not None
        new_blocks: tuple[BlockId, ...] = ()
        if request.num_told_blocks < len(request.blocks):
            if request.num_told_blocks == 0:
                output = tuple(request.tokens[request.num_prompt_tokens :])
                draft.starts.append(SlotStart(request.request_id, request.slot, output, request.num_cached_tokens))
            new_blocks = tuple(request.blocks[request.num_told_blocks :])
            request.num_told_blocks = len(request.blocks)
        return Row(request.request_id, request.slot, start, end, new_blocks, end == len(request.tokens))

    # ------------------------------------------------------------ prefills

    def _add_prefills(self, draft: Draft) -> None:
        for request in self._residents.prefilling:
            if self._may_extend(request, draft) and not draft.is_full and not draft.is_sealed:
                self._add_chunk(request, draft)
        if self._residents.has_free_slot and self._residents.has_waiting:
            self._add_new(draft)

    def _add_new(self, draft: Draft) -> None:
        """Admit from the queue. Who lacks blocks is passed over by those behind, in MAX_PASSED_OVER rounds at most."""
        draft.num_blocks_for_decodes = self._num_blocks_for_decodes()
        blocked: list[Tracked] = []
        num_overtaken = 0
        for request in self._residents.first_waiting(MAX_CANDIDATES):
            if not self._residents.has_free_slot:
                break
            if self._has_room(request, draft) and self._admit(request, draft):
                num_overtaken = len(blocked)
            elif request.num_passed_over >= MAX_PASSED_OVER and self._may_admit(request, draft):
                break
            elif self._has_room(request, draft):
                blocked.append(request)
        for request in blocked[:num_overtaken]:
            request.num_passed_over += 1

    def _num_blocks_for_decodes(self) -> int:
        size = self._config.block_size
        return sum(len(request.tokens) > len(request.blocks) * size for request in self._residents.decoding)

    def _has_room(self, request: Tracked, draft: Draft) -> bool:
        """Permission, and room in this round or on the wire: all that is left to find is blocks."""
        if request.route.prefill is Side.REMOTE:
            return self._residents.num_receiving < self._config.transfer_limit
        return not draft.is_full and not draft.is_sealed and self._may_admit(request, draft)

    def _admit(self, request: Tracked, draft: Draft) -> bool:
        if request.route.prefill is Side.REMOTE:
            return self._reserve(request, draft)
        return self._begin(request, draft)

    def _begin(self, request: Tracked, draft: Draft) -> bool:
        """Blocks and a slot for a new prompt, and its first chunk. A prompt that has no chunk now seals the round."""
        hits = self._prefix_hits(request)
        num_cached = len(hits) * self._config.block_size
        if self._chunk_end(num_cached, len(request.tokens), draft.tokens_left) == num_cached:
            draft.is_sealed = True
            return False
        if not self._take_blocks(request, hits, draft):
            return False
        request.num_computed = request.num_cached_tokens = num_cached
        request.num_published = len(hits)
        request.num_announced = request.peer_cached_tokens
        self._residents.admit(request)
        self._add_chunk(request, draft)
        return True

    def _add_chunk(self, request: Tracked, draft: Draft) -> None:
        start = request.num_computed
        end = self._chunk_end(start, len(request.tokens), draft.tokens_left)
        if end < len(request.tokens):
            draft.is_sealed = True
        if end > start:
            draft.prefill.append(self._row(request, start, end, draft))
            draft.tokens_left -= end - start
            draft.rows_left -= 1

    def _chunk_end(self, start: int, end: int, budget: int) -> int:
        """Where a chunk from `start` ends: at the prompt's end, or at the last block boundary the budget reaches."""
        if end - start <= budget:
            return end
        return start + budget // self._config.block_size * self._config.block_size

    def _reserve(self, request: Tracked, draft: Draft) -> bool:
        """Blocks and a slot for a prompt that a peer prefills."""
        hits = self._prefix_hits(request)
        if not self._take_blocks(request, hits, draft):
            return False
        size = self._config.block_size
        num_blocks = -(-request.num_prompt_tokens // size)
        request.num_computed = request.num_cached_tokens = len(hits) * size
        request.num_published = len(hits)
        transfer_id = self._residents.reserve(request)
        destination = tuple(request.blocks[len(hits) : num_blocks])
        self._residents.transfers[transfer_id] = Transfer(transfer_id, request.request_id, destination)
        draft.reservations.append(
            Reservation(
                request.request_id, transfer_id, request.num_cached_tokens, request.num_prompt_tokens, destination
            )
        )
        return True

    def _prefix_hits(self, request: Tracked) -> list[BlockId]:
        """Cached blocks that cover a prefix of the known tokens, never the last token: its logits are needed."""
        if not self._config.prefix_caching or not request.reads_prefix_cache:
            return []
        num_blocks = (len(request.tokens) - 1) // self._config.block_size
        extend_hashes(request.hashes, request.tokens, num_blocks, self._config.block_size)
        return self._pool.longest_prefix(request.hashes[:num_blocks])

    def _take_blocks(self, request: Tracked, hits: list[BlockId], draft: Draft) -> bool:
        """Hold the hits and allocate the rest: the known tokens, and headroom for the answer. All or nothing."""
        num_tokens = len(request.tokens)
        if request.route.reserves_answer:
            left = request.max_new_tokens - request.num_output_tokens
            num_tokens += min(left, self._config.answer_headroom)
        self._pool.hold(hits)
        num_new = -(-num_tokens // self._config.block_size) - len(hits)
        blocks = self._pool.allocate(num_new, leaving=draft.num_blocks_for_decodes)
        if blocks is None:
            self._pool.release(hits)
            return False
        self._counters.prefix_queried_tokens += len(request.tokens)
        self._counters.prefix_hit_tokens += len(hits) * self._config.block_size
        request.blocks = hits + blocks
        return True

    # ------------------------------------------------------------ out of blocks

    def _taken_back(self) -> tuple[TakenBack, ...]:
        """The newest reservation that only waits in a peer's queue, unless blocks are coming free anyway."""
        transfers = self._residents.transfers.values()
        if any(transfer.state is TransferState.DRAINING for transfer in transfers):
            return ()
        waiting = [transfer for transfer in transfers if not transfer.is_accepted]
        newest = max(waiting, key=lambda t: self._residents.by_id[t.request_id].order, default=None)
        return (TakenBack(newest.request_id, newest.transfer_id),) if newest else ()

    def _given_up(self, draft: Draft) -> tuple[RequestFailed, ...]:
        """The newest blocked decode, where nothing else will free any blocks."""
        if self._will_free_blocks:
            return ()
        error = NotReady(
            f"the KV cache is full: no block of {self._pool.num_blocks} is free and none of "
            f"{len(self._residents.decoding)} answers can grow; this request is the newest of them. "
            "Raise --num-kv-blocks or lower --max-num-seqs"
        )
        return (RequestFailed(draft.blocked_decodes[-1].request_id, error),)

    @property
    def _will_free_blocks(self) -> bool:
        """A transfer or a lease holds blocks, and ends without a round of ours."""
        residents = self._residents
        return bool(residents.transfers) or any(request.has_lease for request in residents.by_id.values())
