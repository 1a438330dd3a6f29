"""Breaks one promise of the scheduler at a time, and shows that the test named for the promise fails (make mutants)."""

from __future__ import annotations

import sys

from tests.mutation import Mutant, run

COPIED = ("pdserve", "tests/scheduler", "pyproject.toml")


def scheduler(module: str) -> str:
    return f"pdserve/scheduler/{module}.py"


MUTANTS = [
    Mutant(
        "ANY is looked at after ALL",
        scheduler("gate"),
        (
            (
                "if rounds != 0 and rounds % self._any_interval == 0:",
                "if rounds % self._attempt_interval and not rounds % self._any_interval:",
            ),
        ),
        "test_gate.py::test_any_is_looked_at_before_all",
    ),
    Mutant(
        "R restarts on an empty window",
        scheduler("gate"),
        (("0 if has_prefill or is_idle else", "0 if has_prefill or is_idle or self.is_open else"),),
        "test_gate.py::test_a_window_in_which_nothing_could_be_scheduled_does_not_restart_the_counter",
    ),
    Mutant(
        "R goes on through idle rounds",
        scheduler("gate"),
        (("0 if has_prefill or is_idle else", "0 if has_prefill else"),),
        "test_gate.py::test_the_counter_restarts_when_all_ranks_are_idle_and_only_then",
    ),
    Mutant(
        "the local want is a round old",
        "pdserve/engine/gating.py",
        (
            (
                "wants = self._scheduler.probe_prefill_gate().wants_prefill\n        window",
                "wants = self._gate._rows[0].wants_prefill\n        window",
            ),
        ),
        "test_gate_seam.py::test_permission_is_used_only_with_a_wish_as_it_is_now",
    ),
    Mutant(
        "exactly 0.9 does not want",
        scheduler("admission"),
        (("<= watermark * self._pool.num_blocks", "< watermark * self._pool.num_blocks"),),
        "test_gate_seam.py::test_a_new_prompt_is_wanted_and_admitted_up_to_the_watermark",
    ),
    Mutant(
        "the redirect asks no permission",
        scheduler("admission"),
        (("is_looked_up and self.may_admit(request, draft)", "is_looked_up"),),
        "test_retraction.py::test_closed_the_redirect_skips_prompts_that_the_gate_holds",
    ),
    Mutant(
        "the fill is checked after the vote",
        scheduler("scheduler"),
        (("PrefillProbe(wants_chunk or wants_prompt,", "PrefillProbe(wants_chunk or is_prompt_ready,"),),
        "test_fill.py::test_a_rank_under_its_fill_joins_a_window_that_others_opened",
    ),
    Mutant(
        "the probe counts holds",
        scheduler("fill"),
        (("        if waiting_tokens == 0:\n", "        self._num_holds += 1\n        if waiting_tokens == 0:\n"),),
        "test_fill.py::test_the_probe_alone_counts_nothing",
    ),
    Mutant(
        "a due decode that cannot run is forgotten",
        scheduler("planner"),
        (
            (
                "        if draft.decode:\n            self._count_holds(held, draft)\n",
                "        self._cadence.on_decode_round()\n",
            ),
        ),
        "test_cadence.py::test_a_decode_that_is_owed_but_cannot_run_stays_owed_and_fires_once_at_its_first_chance",
    ),
    Mutant(
        "blocks are free before they are quiet",
        scheduler("scheduler"),
        (
            (
                "        self._residents.forget_transfer(transfer)\n        self._pool.release(transfer.blocks)\n",
                "        self._residents.forget_transfer(transfer)\n",
            ),
            (
                "        on_wire = set(transfer.blocks)\n",
                "        on_wire = set(transfer.blocks)\n        self._pool.release(transfer.blocks)\n",
            ),
        ),
        "test_routes.py::test_a_failed_transfer_publishes_nothing_and_keeps_its_blocks_until_it_is_quiet",
    ),
    Mutant(
        "a hash is published before the commit",
        scheduler("admission"),
        (
            (
                "        transfer_id = self._residents.reserve(request)\n",
                "        transfer_id = self._residents.reserve(request)\n"
                "        for block_hash, block in zip(request.hashes, request.blocks, strict=False):\n"
                "            self._pool.publish(block_hash, block)\n",
            ),
        ),
        "test_routes.py::test_nothing_is_published_before_the_commit",
    ),
    Mutant(
        "a prefix is found in the host before its copy has landed",
        scheduler("tiers"),
        (
            (
                "            started.append(copy)\n",
                "            started.append(copy)\n            self.pool.publish(block_hash, host_blocks[0])\n",
            ),
        ),
        "test_tiers.py::test_a_prefix_is_found_in_the_host_only_when_its_copy_has_landed",
    ),
    Mutant(
        "blocks that storage did not verify are found",
        scheduler("tiers"),
        (("strict=True))[:num_blocks]", "strict=True))"),),
        "test_tiers.py::test_a_corrupt_block_is_a_miss_from_there_on",
    ),
    Mutant(
        "a load comes before the image it overwrites",
        scheduler("admission"),
        (("draft.copies.append(self._host.load(on_host", "draft.copies.insert(0, self._host.load(on_host"),),
        "test_retraction.py::test_an_image_is_saved_before_its_blocks_are_loaded_for_somebody_else",
    ),
    Mutant(
        "a late answer wakes a later request of the same id",
        scheduler("scheduler"),
        (("request is not None and request.job_id == job_id", "request is not None"),),
        "test_tiers.py::test_a_read_of_a_request_that_left_does_not_wake_a_later_one_of_its_name",
    ),
    Mutant(
        "an answer just restored is a victim",
        scheduler("retraction"),
        (("return request.num_computed != request.num_computed_at_restore", "return True"),),
        "test_readmission.py::test_a_restored_answer_is_no_victim_before_it_has_drawn_a_token",
    ),
    Mutant(
        "a prompt takes the place of one that was retracted before",
        scheduler("retraction"),
        (("if victim.num_computed_at_restore is None", "if victim.blocks"),),
        "test_retraction.py::test_a_prompt_never_takes_the_place_of_one_that_was_retracted_before",
    ),
    Mutant(
        "what a prompt shares with its victim counts as freed",
        scheduler("retraction"),
        (
            (
                "(block for block in victim.blocks if block not in hits)",
                "(block for block in victim.blocks if hits is not block)",
            ),
        ),
        "test_retraction.py::test_a_prefix_shared_with_the_victim_is_not_counted_as_freed",
    ),
    Mutant(
        "an image that lacks blocks lets others in",
        scheduler("admission"),
        (("                draft.is_sealed_for_new = True\n", ""),),
        "test_readmission.py::test_an_image_that_lacks_blocks_keeps_every_new_request_out_and_moves_nobody",
    ),
    Mutant(
        "an answer fails while a closed gate alone holds a prompt",
        scheduler("planner"),
        (("return is_held or self._residents.num_restoring > 0", "return self._residents.num_restoring > 0"),),
        "test_retraction.py::test_nobody_fails_while_a_closed_gate_alone_keeps_an_unfinished_prompt_from_running",
    ),
]


if __name__ == "__main__":
    sys.exit(run(MUTANTS, copied=COPIED, folder="tests/scheduler"))
