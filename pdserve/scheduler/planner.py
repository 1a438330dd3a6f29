"""Builds one round's plan: prefill or decode first, who is made room for, and what moves between the tiers."""

from __future__ import annotations

from pdserve.request import Side
from pdserve.scheduler.admission import Admission
from pdserve.scheduler.block_pool import BlockPool
from pdserve.scheduler.cadence import Cadence
from pdserve.scheduler.config import CadenceLimits, SchedulerConfig
from pdserve.scheduler.counters import Counters
from pdserve.scheduler.draft import Draft
from pdserve.scheduler.fill import FillCondition
from pdserve.scheduler.plan import PlanOptions, RoundPlan
from pdserve.scheduler.residents import Residents
from pdserve.scheduler.retraction import Retraction
from pdserve.scheduler.state import Tracked
from pdserve.scheduler.tiers import HostTier


class Planner:
    """Plans rounds over the residents, the pool and the host tier, which it shares with the scheduler that owns it."""

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, residents: Residents, host: HostTier, counters: Counters
    ) -> None:
        self._config = config
        self._residents = residents
        self._host = host
        self._counters = counters
        self._admission = Admission(config, pool, residents, host, counters)
        self._retraction = Retraction(config, pool, residents, host, self._admission, counters)
        limits = config.cadence or CadenceLimits()
        self._cadence = Cadence(limits.prefill_rounds, limits.decode_rounds)
        self._hold_budget = limits.hold_budget
        self._fill = FillCondition(config.fill_tokens, config.fill_max_holds) if config.fill_tokens else None

    def plan(self, round_id: int, options: PlanOptions) -> RoundPlan:
        draft = Draft(self._config.max_scheduled_tokens, self._config.max_batch_size, options.allow_prefill)
        self._count_fill_hold()
        fetches = self._admission.start_fetches()
        self._admission.add_restore(draft)
        if self._config.enable_mixed_batch:
            self._fill_mixed(draft)
        else:
            self._fill_alone(draft)
        self._count_round(draft)
        is_stuck = not draft.batch_size and bool(draft.blocked_decodes) and not self._will_run_later(draft)
        return RoundPlan(
            round_id,
            tuple(draft.starts),
            tuple(draft.prefill),
            tuple(draft.decode),
            tuple(draft.reservations),
            failed=self._retraction.given_up(draft) if is_stuck else (),
            taken_back=self._retraction.taken_back() if is_stuck else (),
            copies=tuple(draft.copies),
            write_backs=tuple(self._host.write_backs()),
            fetches=tuple(fetches),
            stores=tuple(self._host.stores()),
        )

    # ------------------------------------------------------------ the two shapes

    def _fill_alone(self, draft: Draft) -> None:
        """Prefill or decode, never both. Prefill is asked first, unless the cadence owes a decode."""
        is_due = self._cadence.owes_decode
        if is_due:
            self._add_owed(draft)
        if not draft.batch_size:
            self._add_prefills(draft)
        if not draft.batch_size and not is_due:
            self._add_decodes(draft, reserve=0)
            self._retraction.grow_blocked(draft)

    def _add_owed(self, draft: Draft) -> None:
        """Prefills that the cadence may hold no longer, else decodes. If none can run nobody is held."""
        held = self._could_start(draft)
        if self._hold_budget is not None:
            self._admission.add_prefills(draft, self._is_overdue)
        if not draft.prefill:
            self._add_decodes(draft, reserve=0)
            self._retraction.grow_blocked(draft)
        if draft.decode:
            self._count_holds(held, draft)

    def _fill_mixed(self, draft: Draft) -> None:
        """Decodes, and prefill in what they leave; where the cadence owes a decode only such as it may not hold."""
        is_due = self._cadence.owes_decode
        could_start = self._could_start(draft)
        needs_room = any(map(self._is_overdue, could_start)) if is_due else bool(could_start)
        self._add_decodes(draft, self._config.prefill_reserve if needs_room else 0)
        if is_due and draft.decode:
            self._admission.add_prefills(draft, self._is_overdue)
            self._count_holds(could_start, draft)
        else:
            self._add_prefills(draft)
        if not draft.prefill:
            self._retraction.grow_blocked(draft)

    def _add_prefills(self, draft: Draft) -> None:
        self._admission.add_prefills(draft)
        if not draft.prefill:
            self._retraction.admit_blocked(draft)

    def _add_decodes(self, draft: Draft, reserve: int) -> None:
        room = min(draft.tokens_left - reserve, draft.rows_left)
        for request in self._residents.decoding:
            if len(draft.decode) >= room:
                break
            if not self._admission.try_decode(request, draft):
                draft.blocked_decodes.append(request)

    def _could_start(self, draft: Draft) -> list[Tracked]:
        """Who a round without decodes could give a chunk: resident chunks, and new prompts where a slot is free."""
        new = self._admission.candidates() if self._residents.has_free_slot else []
        return [r for r in self._residents.prefilling if self._admission.may_extend(r, draft)] + [
            r for r in new if r.route.prefill is Side.LOCAL and self._admission.has_room(r, draft)
        ]

    def _will_run_later(self, draft: Draft) -> bool:
        """Somebody here goes on in a later round without anybody ending: blocks will come free."""
        is_held = any(not self._admission.may_extend(request, draft) for request in self._residents.prefilling)
        return is_held or self._residents.num_restoring > 0

    # ------------------------------------------------------------ cadence

    @property
    def owes_decode(self) -> bool:
        return self._cadence.owes_decode

    def _is_overdue(self, request: Tracked) -> bool:
        """The cadence has held it for as long as it may."""
        return self._hold_budget is not None and request.num_holds >= self._hold_budget

    def _count_holds(self, held: list[Tracked], draft: Draft) -> None:
        """One more for each that the cadence kept from running, and not something else."""
        runs = {row.request_id for row in draft.prefill}
        for request in held:
            request.num_holds += request.request_id not in runs and not self._is_overdue(request)

    def _count_round(self, draft: Draft) -> None:
        if draft.prefill and self._fill is not None:
            self._fill.on_prefill()
        if draft.prefill:
            self._cadence.on_prefill_round()
        elif draft.decode:
            self._cadence.on_decode_round()

    # ------------------------------------------------------------ wishes and votes

    @property
    def is_below_watermark(self) -> bool:
        return self._admission.is_below_watermark

    def is_worth_a_round(self, *, has_decode_work: bool) -> bool:
        """New prompts alone are worth a vote; always without a fill condition."""
        if self._fill is None:
            return True
        return self._fill.is_ready(self._waiting_tokens, has_decode_work=has_decode_work)

    @property
    def _waiting_tokens(self) -> int:
        return self._admission.waiting_tokens(self._config.fill_tokens or 0)

    def _count_fill_hold(self) -> None:
        """Resident chunks vote in any case, so nothing is held while there are any."""
        residents = self._residents
        if self._fill is None or residents.num_gated_prefilling:
            return
        self._fill.on_round(
            self._waiting_tokens,
            has_decode_work=bool(residents.decoding),
            wants_prefill=residents.num_gated_waiting > 0 and self.is_below_watermark,
        )
