"""The scheduler of one rank: submissions and events in, one plan a round out. Deterministic, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdserve.errors import InternalError, InvalidRequest, RequestIdInUse
from pdserve.request import FUSED, BlockId, FinishReason, RequestId, Side, TransferId
from pdserve.scheduler.block_pool import BlockPool
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.plan import (
    AnswerEnded,
    ChunkComputed,
    Event,
    HostCopyDone,
    KvAccepted,
    KvQuiet,
    KvReceived,
    LeaseReleased,
    LeaseRevoked,
    LeaseUnwanted,
    Outcome,
    PlanOptions,
    PrefillProbe,
    RequestAborted,
    RoundPlan,
    Row,
    StepDone,
    Submission,
    TokenDrawn,
    TransferFailed,
    TransferUnwanted,
)
from pdserve.scheduler.planner import Planner
from pdserve.scheduler.prefix_cache import extend_hashes
from pdserve.scheduler.residents import Residents
from pdserve.scheduler.state import HOLDS_BLOCKS, HOLDS_IMAGE, Move, State, Tracked, TransferMove, TransferState
from pdserve.scheduler.storage_plan import StorageLate, StorageReady, Stored
from pdserve.scheduler.tiers import HostTier


class Scheduler:
    """Plans rounds over one slab. Owned by one thread.

    A round is outstanding from `plan` to its StepDone; blocks its rows name are not given back in between.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._pool = BlockPool(config.num_blocks)
        self._residents = Residents(config.max_batch_size)
        self._host = HostTier(self._pool, config.num_host_blocks, has_storage=config.has_storage)
        self._planner = Planner(config, self._pool, self._residents, self._host, self.counters)
        self._num_submissions = 0
        self._outstanding: RoundPlan | None = None

    # ------------------------------------------------------------ requests in

    def submit(self, submission: Submission) -> None:
        """Queue a request. Raises InvalidRequest for what can never fit, RequestIdInUse for a live id."""
        if submission.request_id in self._residents.by_id:
            raise RequestIdInUse(f"request_id {submission.request_id!r} is in use")
        self._refuse_what_never_fits(submission)
        self._num_submissions += 1
        self._residents.enqueue(
            Tracked(
                request_id=submission.request_id,
                order=(submission.priority, self._num_submissions),
                route=submission.route,
                tokens=[*submission.prompt, *submission.forced_output],
                num_prompt_tokens=len(submission.prompt),
                max_new_tokens=submission.max_new_tokens,
                min_new_tokens=submission.min_new_tokens,
                stop_token_ids=submission.stop_token_ids,
                peer_cached_tokens=submission.peer_cached_tokens,
                reads_prefix_cache=submission.reads_prefix_cache,
            )
        )

    def _refuse_what_never_fits(self, submission: Submission) -> None:
        num_prompt = len(submission.prompt)
        if num_prompt == 0:
            raise InvalidRequest("prompt is empty, it needs at least one token")
        num_forced = len(submission.forced_output)
        assert num_forced == 0 or submission.route == FUSED, "the side that draws the first token is elsewhere"
        if num_forced >= submission.max_new_tokens:
            raise InvalidRequest(
                f"max_new_tokens is {submission.max_new_tokens}, it must be more than the {num_forced} tokens that "
                "the answer has already"
            )
        num_new = submission.max_new_tokens if submission.route.reserves_answer else 0
        if num_prompt + num_new > self.config.max_model_len:
            raise InvalidRequest(
                f"prompt has {num_prompt} tokens and max_new_tokens is {num_new}, "
                f"the context limit is {self.config.max_model_len}"
            )
        fits = self.config.num_blocks * self.config.block_size
        if self._num_blocks_for(num_prompt + num_new) > self.config.num_blocks:
            raise InvalidRequest(
                f"prompt has {num_prompt} tokens and max_new_tokens is {num_new}, "
                f"the KV cache holds {fits}: shorten the request or raise --num-kv-blocks"
            )

    def abort(self, request_id: RequestId) -> tuple[Outcome, ...]:
        """End a live request for its caller at once; what it holds goes when nobody uses it. Unknown: nothing."""
        request = self._residents.by_id.get(request_id)
        if request is None or request.state is State.STOPPING:
            return ()
        outcomes: list[Outcome] = [RequestAborted(request_id)]
        if request.transfer_id is not None:
            outcomes.append(self._abandon_transfer(request))
        if request.has_lease:
            outcomes.append(LeaseUnwanted(request_id))
        self._end(request)
        return tuple(outcomes)

    # ------------------------------------------------------------ rounds

    def probe_prefill_gate(self) -> PrefillProbe:
        """This rank's vote, read only. A prompt whose last chunk is in the outstanding round is decode work already."""
        residents = self._residents
        num_completing = sum(request.route.is_gated for request in self._completing())
        has_decode_work = bool(residents.decoding) or num_completing > 0
        wants_chunk = residents.num_gated_prefilling > num_completing
        wants_prompt = residents.num_gated_waiting > 0 and self._planner.is_below_watermark
        is_prompt_ready = wants_prompt and self._planner.is_worth_a_round(has_decode_work=has_decode_work)
        return PrefillProbe(wants_chunk or wants_prompt, has_decode_work, vote=wants_chunk or is_prompt_ready)

    def _completing(self) -> Iterator[Tracked]:
        """Live requests whose last chunk is in the outstanding round."""
        for row in self._outstanding.prefill if self._outstanding else ():
            request = self._residents.by_id[row.request_id]
            if row.samples and request.state is State.PREFILLING:
                yield request

    def plan(self, options: PlanOptions | None = None) -> RoundPlan:
        """The next round. Only after the StepDone of the one before."""
        assert self._outstanding is None, "plan() before the StepDone of the round before"
        self.counters.rounds += 1
        plan = self._planner.plan(self.counters.rounds, options or PlanOptions())
        if plan.batch_size:
            self._outstanding = plan
        self.counters.prefill_rounds += bool(plan.prefill)
        for failure in plan.failed:
            self.counters.capacity_failures += 1
            self._end(self._residents.by_id[failure.request_id])
        for taken in plan.taken_back:
            self._take_back(self._residents.by_id[taken.request_id])
        return plan

    def _take_back(self, request: Tracked) -> None:
        """Its reservation is undone; what is not on the wire is free at once, the rest when the transfer is quiet."""
        self._abandon_transfer(request)
        self._pool.release(request.blocks)
        self.counters.reservations_taken_back += 1
        self._residents.requeue(request, request.route)

    def advance(self, events: Iterable[Event]) -> tuple[Outcome, ...]:
        """Apply events in order, and what came of them. Events for unknown ids are counted and ignored."""
        outcomes: list[Outcome] = []
        for event in events:
            match event:
                case StepDone():
                    self._on_step_done(event, outcomes)
                case KvAccepted():
                    self._on_kv_accepted(event)
                case KvReceived():
                    self._on_kv_received(event, outcomes)
                case TransferFailed():
                    self._on_transfer_failed(event, outcomes)
                case KvQuiet():
                    self._on_kv_quiet(event)
                case LeaseReleased() | LeaseRevoked():
                    self._on_lease_ended(event, outcomes)
                case HostCopyDone() | StorageReady() | StorageLate() | Stored():
                    self._on_tier_event(event)
        return tuple(outcomes)

    # ------------------------------------------------------------ a round is done

    def _on_step_done(self, event: StepDone, outcomes: list[Outcome]) -> None:
        plan = self._outstanding
        if plan is None or plan.round_id != event.round_id:
            raise InternalError(f"StepDone names round {event.round_id}, outstanding is {plan and plan.round_id}")
        tokens, num_sampled = event.tokens, sum(row.samples for row in plan.prefill) + len(plan.decode)
        if len(tokens) != num_sampled:
            raise InternalError(f"StepDone brings {len(tokens)} tokens, round {plan.round_id} draws {num_sampled}")
        self._outstanding = None
        by_id, sample = self._residents.by_id, 0
        for row in plan.rows:
            request = by_id[row.request_id]
            if request.state is State.DECODING:
                self._on_decoded(request, row.end, tokens[sample], sample, outcomes)
            elif request.state is State.PREFILLING:
                self._on_chunk_computed(request, row, outcomes)
                if row.samples:
                    self._on_prefilled(request, tokens[sample], sample, outcomes)
            else:
                self._settle(request)
            sample += row.samples

    def _on_decoded(self, request: Tracked, end: int, token: int, sample: int, outcomes: list[Outcome]) -> None:
        request.num_computed = end
        if end % self.config.block_size == 0:
            self._publish_full_blocks(request)
        if self._on_token(request, token, sample, outcomes) is not None:
            self._end(request)

    def _on_chunk_computed(self, request: Tracked, row: Row, outcomes: list[Outcome]) -> None:
        request.num_computed = row.end
        self._publish_full_blocks(request)
        self.counters.prompt_tokens_computed += row.end - row.start
        if request.route.decode is Side.REMOTE:
            self._announce(request, row.end, outcomes)

    def _on_prefilled(self, request: Tracked, token: int, sample: int, outcomes: list[Outcome]) -> None:
        finish = self._on_token(request, token, sample, outcomes)
        if request.route.decode is Side.REMOTE:
            self._residents.send_off(request)
        elif finish is None:
            self._residents.start_decoding(request)
        else:
            self._end(request)

    def _on_token(self, request: Tracked, token: int, sample: int, outcomes: list[Outcome]) -> FinishReason | None:
        request.tokens.append(token)
        self.counters.output_tokens += 1
        finish, matched = self._finish_of(request, token)
        outcomes.append(TokenDrawn(request.request_id, token, sample, finish, matched))
        return finish

    def _finish_of(self, request: Tracked, token: int) -> tuple[FinishReason | None, int | None]:
        """How the answer ends with `token`, and the stop token that ended it."""
        num_output = len(request.tokens) - request.num_prompt_tokens
        if token in request.stop_token_ids and num_output > request.min_new_tokens:
            return FinishReason.STOP, token
        if num_output >= request.max_new_tokens:
            return FinishReason.LENGTH, None
        return None, None

    def _announce(self, request: Tracked, end: int, outcomes: list[Outcome]) -> None:
        """Tell of the computed prompt tokens that the peer does not hold."""
        first = request.num_announced
        if end <= first:
            return
        size = self.config.block_size
        blocks = tuple(request.blocks[first // size : -(-end // size)])
        generations = tuple(self._pool.generation(block) for block in blocks)
        outcomes.append(ChunkComputed(request.request_id, first, end, blocks, generations))
        request.num_announced = end

    def _publish_full_blocks(self, request: Tracked) -> None:
        num_full = request.num_computed // self.config.block_size
        if num_full <= request.num_published or not self.config.prefix_caching:
            return
        extend_hashes(request.hashes, request.tokens, num_full, self.config.block_size)
        for index in range(request.num_published, num_full):
            self._pool.publish(request.hashes[index], request.blocks[index])
        request.num_published = num_full

    # ------------------------------------------------------------ transfers

    def _on_kv_accepted(self, event: KvAccepted) -> None:
        transfer = self._residents.transfers.get(event.transfer_id)
        if transfer is None:
            self.counters.ignored_events += 1
        else:
            transfer.is_accepted = True

    def _on_kv_received(self, event: KvReceived, outcomes: list[Outcome]) -> None:
        transfer = self._residents.transfers.get(event.transfer_id)
        if transfer is None:
            self.counters.ignored_events += 1
            return
        if transfer.state is TransferState.DRAINING:  # it completed while it was being given up: quiet, unwanted
            self._on_kv_quiet(KvQuiet(event.transfer_id))
            return
        request = self._residents.by_id[transfer.request_id]
        transfer.move(TransferMove.COMMIT)
        self._residents.forget_transfer(transfer)
        request.transfer_id = None
        request.num_computed = request.num_prompt_tokens
        self._publish_full_blocks(request)
        request.tokens.append(event.first_token)
        if not self._ends_with(request, event.first_token, outcomes):
            self._residents.start_decoding(request)

    def _on_transfer_failed(self, event: TransferFailed, outcomes: list[Outcome]) -> None:
        """Prefill anew in new blocks, at the request's old place; an answer that is complete just ends."""
        assert not (event.stays_remote and event.forced_output), "the first token is out: nobody draws it again"
        transfer = self._residents.transfers.get(event.transfer_id)
        if transfer is None or transfer.state is not TransferState.OPEN:
            self.counters.ignored_events += 1
            return
        request = self._residents.by_id[transfer.request_id]
        outcomes.append(self._abandon_transfer(request))
        request.tokens += event.forced_output
        if event.forced_output and self._ends_with(request, event.forced_output[-1], outcomes):
            return
        self._pool.release(request.blocks)
        if event.stays_remote:
            self.counters.remote_retries += 1
        else:
            self.counters.reroutes += 1
        self._residents.requeue(request, request.route if event.stays_remote else FUSED)

    def _ends_with(self, request: Tracked, token: int, outcomes: list[Outcome]) -> bool:
        """End the answer if `token`, drawn by a peer, is its last."""
        finish, matched = self._finish_of(request, token)
        if finish is None:
            return False
        outcomes.append(AnswerEnded(request.request_id, finish, matched))
        self._end(request)
        return True

    def _abandon_transfer(self, request: Tracked) -> TransferUnwanted:
        """The destination blocks stay behind with the transfer; the request keeps the rest."""
        assert request.transfer_id is not None
        transfer = self._residents.transfers[request.transfer_id]
        transfer.move(TransferMove.ABANDON)
        on_wire = set(transfer.blocks)
        request.blocks = [block for block in request.blocks if block not in on_wire]
        request.transfer_id = None
        return TransferUnwanted(transfer.transfer_id)

    def _on_kv_quiet(self, event: KvQuiet) -> None:
        transfer = self._residents.transfers.get(event.transfer_id)
        if transfer is None or transfer.state is not TransferState.DRAINING:
            self.counters.ignored_events += 1
            return
        transfer.move(TransferMove.SETTLE)
        self._residents.forget_transfer(transfer)
        self._pool.release(transfer.blocks)

    # ------------------------------------------------------------ tiers

    def _on_tier_event(self, event: HostCopyDone | StorageReady | StorageLate | Stored) -> None:
        """A job below the device has ended, or is waited for no longer; whoever waited goes on."""
        job_id, request_id = 0, None
        try:
            match event:
                case HostCopyDone(job_id):
                    request_id = self._host.finish_copy(job_id)
                case StorageReady(job_id, num_blocks):
                    request_id = self._host.finish_fetch(job_id, num_blocks)
                    self.counters.storage_blocks_fetched += num_blocks
                case StorageLate(job_id):
                    request_id = self._host.stop_waiting(job_id)
                case Stored(job_id):
                    self._host.finish_store(job_id)
        except KeyError:
            self.counters.ignored_events += 1
            return
        request = self._residents.by_id.get(request_id) if request_id is not None else None
        if request is not None and request.job_id == job_id:  # not for a later request of the same id
            self._go_on(request)

    def _go_on(self, request: Tracked) -> None:
        """The image of a retracted request has landed, or is back on the device; or its fetch is over."""
        request.job_id = None
        if request.state is State.RESTORING:
            self._host.pool.release(request.image)
            request.image = []
            self._residents.resume(request)
        elif request.state is State.FETCHING:
            self._residents.finish_fetch(request)

    # ------------------------------------------------------------ leases

    def _on_lease_ended(self, event: LeaseReleased | LeaseRevoked, outcomes: list[Outcome]) -> None:
        request = self._residents.by_id.get(event.request_id)
        if request is None or not request.has_lease:
            self.counters.ignored_events += 1
            return
        self._residents.end_lease(request)
        if request.state is State.STOPPING:
            self._settle(request)
            return
        if request.state is State.PREFILLING:  # the peer gave up before the prompt was done
            outcomes.append(RequestAborted(request.request_id))
        self._end(request)

    # ------------------------------------------------------------ ends

    def _end(self, request: Tracked) -> None:
        """Take the request out of scheduling, and give back what it holds as soon as nobody uses it."""
        self._residents.retire(request)
        if request.has_lease or self._is_in_round(request):
            request.move(Move.STOP)
        else:
            self._finish(request)

    def _settle(self, request: Tracked) -> None:
        if not request.has_lease and not self._is_in_round(request):
            self._finish(request)

    def _is_in_round(self, request: Tracked) -> bool:
        plan = self._outstanding
        return plan is not None and any(row.request_id == request.request_id for row in plan.rows)

    def _finish(self, request: Tracked) -> None:
        self._pool.release(request.blocks)
        self._host.pool.release(request.image)
        request.blocks = request.image = []
        self._residents.forget(request)
        request.move(Move.END)

    # ------------------------------------------------------------ what others may ask

    @property
    def has_work(self) -> bool:
        """Somebody waits for a round; a round may still have to wait for blocks, a slot or a peer."""
        residents = self._residents
        is_detoured = residents.num_fetching or residents.retracted or residents.num_restoring
        return bool(residents.prefilling or residents.decoding or residents.has_waiting or is_detoured)

    @property
    def is_idle(self) -> bool:
        """No request lives, no transfer drains, and no copy, fetch or store is under way."""
        return not self._residents.by_id and not self._residents.transfers and not self._host.num_jobs

    @property
    def num_waiting(self) -> int:
        """In the queue, or on the detour to storage."""
        return self._residents.num_waiting + self._residents.num_fetching

    @property
    def num_waiting_tokens(self) -> int:
        return sum(request.num_left_to_compute for request in self._residents.waiting_requests())

    @property
    def num_running(self) -> int:
        return len(self._residents.by_id) - self.num_waiting

    @property
    def has_free_slot(self) -> bool:
        return self._residents.has_free_slot

    @property
    def num_held_blocks(self) -> int:
        return self._pool.num_held

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    @property
    def num_draining_blocks(self) -> int:
        """Blocks that no request has and a transfer may still write: quarantined."""
        return sum(len(t.blocks) for t in self._residents.transfers.values() if t.state is TransferState.DRAINING)

    @property
    def num_transfers(self) -> int:
        return len(self._residents.transfers)

    @property
    def num_leases(self) -> int:
        """Requests whose blocks a peer may read."""
        return self._residents.num_leases

    @property
    def owes_decode(self) -> bool:
        """The cadence has the next round ask decode first."""
        return self._planner.owes_decode

    def generation(self, block: BlockId) -> int:
        """The block's generation now, to be compared with an announced one."""
        return self._pool.generation(block)

    def transfer_of(self, request_id: RequestId) -> TransferId | None:
        request = self._residents.by_id.get(request_id)
        return request.transfer_id if request else None

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def check_integrity(self) -> None:
        """free + cached + held == total, every reference has its holder, every request is where its state says."""
        tables: list[Iterable[BlockId]] = [request.blocks for request in self._residents.by_id.values()]
        tables += [t.blocks for t in self._residents.transfers.values() if t.state is TransferState.DRAINING]
        self._pool.check_integrity([*tables, *self._host.device_holders()])
        self._host.check_integrity(request.image for request in self._residents.by_id.values())
        for request in self._residents.by_id.values():
            assert (request.state in HOLDS_BLOCKS) == bool(request.blocks), f"{request.state.name} and its blocks"
            assert (request.state in HOLDS_IMAGE) == bool(request.image), f"{request.state.name} and its image"
        self._residents.check_integrity()
