"""Breaks one safety rule of the handoff at a time, and shows that the test named for it fails (make mutants)."""

from __future__ import annotations

import sys

from tests.mutation import Mutant, run

COPIED = (
    *("pdserve", "prefill_node", "decode_node", "fused", "pyproject.toml"),
    *("tests/transfer", "tests/engine", "tests/roles", "tests/scheduler", "tests/prefill_node"),
)
LINK, PULL, LEASE = "pdserve/transfer/link.py", "pdserve/transfer/pull.py", "pdserve/transfer/lease.py"
LENDING, PULLING = "pdserve/engine/lending.py", "pdserve/engine/pulling.py"
THREAD, SCHEDULER = "pdserve/engine/transport_thread.py", "pdserve/scheduler/scheduler.py"
DECODE, PREFILL = "decode_node/handoff.py", "prefill_node/handoff.py"
COVERAGE, PARTS, QUORUM = "decode_node/coverage.py", "prefill_node/parts.py", "pdserve/engine/quorum.py"

MUTANTS = [
    # ------------------------------------------------------------ confirm, then commit
    Mutant(
        "the decode node confirms to itself what it has read",
        DECODE,
        (
            (
                "await self._write(call, encode_to_prefill(Release(self._lease_id)))",
                "self._rank.tell_transport(ConfirmPull(self._transfer_id, True, first.token_id))",
            ),
        ),
        "roles/test_protocol.py::test_a_release_that_the_prefill_node_never_hears_is_no_confirmation",
    ),
    Mutant(
        "a refusal is taken for a confirmation",
        PULL,
        (("        if not valid:\n", "        if not valid and pull.state is PullState.OPEN:\n"),),
        "transfer/test_pull.py::test_a_refused_confirmation_is_a_failure_whatever_was_read",
    ),
    Mutant(
        "the end of the stream after the release is taken for a confirmation",
        DECODE,
        (
            (
                "        if not self._is_confirmed:\n            raise error\n",
                "        if not self._is_release_sent:\n            raise error\n        self._coverage.commit(0)\n",
            ),
        ),
        "roles/test_protocol.py::test_whatever_a_prefill_node_says_wrong_the_answer_is_right_and_says_where_it_was_prefilled"
        "[error right after the release]",
    ),
    Mutant(
        "a commit comes before everything is read",
        PULL,
        (
            (
                "        if pull.state is not PullState.COMPLETE:\n",
                "        pull.state = PullState.COMPLETE\n        if pull.state is not PullState.COMPLETE:\n",
            ),
        ),
        "transfer/test_pull.py::test_a_confirmation_before_everything_is_read_is_a_failure",
    ),
    Mutant(
        "a commit comes with one rank missing",
        PULL,
        (("is_covered = all(", "is_covered = any("),),
        "transfer/test_pull.py::test_a_pull_with_one_rank_missing_is_not_complete",
    ),
    Mutant(
        "a hash is published before the commit",
        "pdserve/scheduler/admission.py",
        (
            (
                "        transfer_id = self._residents.reserve(request)\n",
                "        transfer_id = self._residents.reserve(request)\n"
                "        for block_hash, block in zip(request.hashes, request.blocks, strict=False):\n"
                "            self._pool.publish(block_hash, block)\n",
            ),
        ),
        "scheduler/test_routes.py::test_nothing_is_published_before_the_commit",
    ),
    Mutant(
        "a late completion revives a transfer that was given up",
        PULL,
        (
            (
                "        if pull.state is PullState.DRAINING:\n            return self._if_quiet(pull)\n"
                "        if not pull.is_read:\n",
                "        if pull.state is PullState.DRAINING:\n            pull.state = PullState.OPEN\n"
                "        if not pull.is_read:\n",
            ),
        ),
        "transfer/test_pull.py::test_an_abandoned_pull_waits_for_its_reads_and_takes_no_more_chunks",
    ),
    Mutant(
        "a read that failed and then says done is done",
        LINK,
        (("return self.failure is None and self.num_open_handles == 0", "return self.num_open_handles == 0"),),
        "transfer/test_link.py::test_r2_a_fault_is_not_quiet_and_its_bytes_are_waited_for",
    ),
    # ------------------------------------------------------------ revoke, then free
    Mutant(
        "the loop is told of a revocation that the table never heard of",
        LENDING,
        (
            (
                "        revoked = self._leases.revoke(lease_id, reason)\n",
                "        revoked = RevokedLease(lease_id, RequestId(lease_id), reason)\n",
            ),
        ),
        "engine/test_transport_thread.py::test_a_lease_is_revoked_before_the_loop_is_told",
    ),
    Mutant(
        "an abort frees blocks that are still leased",
        SCHEDULER,
        (
            (
                "        if request.has_lease or self._is_in_round(request):\n            request.move(Move.STOP)\n",
                "        if self._is_in_round(request):\n            request.move(Move.STOP)\n",
            ),
        ),
        "scheduler/test_aborts.py::test_an_aborted_sender_is_revoked_before_its_blocks_are_free",
    ),
    Mutant(
        "a revoked lease answers true",
        LEASE,
        (
            (
                "    (LeaseState.LIVE, LeaseEvent.REVOKE): LeaseState.REVOKED,\n",
                "    (LeaseState.LIVE, LeaseEvent.REVOKE): LeaseState.LIVE,\n",
            ),
        ),
        "transfer/test_lease.py::test_a_revoked_lease_never_answers_true",
    ),
    Mutant(
        "the generation of a block is ignored",
        LEASE,
        (
            (
                "if any(current_generation(block) != generation for block, generation in lease.generations):",
                "if any(current_generation(block) < generation for block, generation in lease.generations):",
            ),
        ),
        "transfer/test_lease.py::test_a_block_given_out_anew_is_a_fault_of_ours_and_never_valid",
    ),
    Mutant(
        "a chunk is announced that the table does not hold",
        LENDING,
        (
            (
                "if self._leases.announce(chunk.lease_id, chunk.blocks, chunk.generations):",
                "if self._leases.announce(chunk.lease_id, chunk.blocks, chunk.generations) or True:",
            ),
            ("if self._leases.state(chunk.lease_id) is LeaseState.LIVE:", "if chunk.blocks:"),
        ),
        "engine/test_transport_thread.py::test_a_chunk_of_a_revoked_lease_is_told_to_nobody",
    ),
    Mutant(
        "a lease that nobody renews lives on",
        LENDING,
        (("for lease in self._leases.expire(now_s):", "for lease in self._leases.expire(0.0):"),),
        "engine/test_transport_thread.py::test_a_lease_that_nobody_renews_is_revoked",
    ),
    Mutant(
        "a lease id that ended is used again",
        LEASE,
        (("        if self.state(lease_id) is not None:\n", "        if lease_id in self._live:\n"),),
        "transfer/test_lease.py::test_a_lease_id_is_never_used_twice",
    ),
    # ------------------------------------------------------------ quiet, then free
    Mutant(
        "an exception is quiet",
        LINK,
        (
            (
                "            self._fail(posted.read, reason)  # R2: it stays among the handles\n",
                "            self._fail(posted.read, reason)\n            posted.read.num_open_handles -= 1\n",
            ),
        ),
        "transfer/test_link.py::test_r2_a_fault_is_not_quiet_and_its_bytes_are_waited_for",
    ),
    Mutant(
        "releasing a handle in progress frees its memory",
        LINK,
        (
            (
                "            self._fail(posted.read, reason)  # R2: it stays among the handles\n",
                "            self._fail(posted.read, reason)\n            self.wire.release(posted.handle)\n"
                "            posted.read.num_open_handles -= 1\n            posted.state = HandleState.DONE\n",
            ),
        ),
        "transfer/test_link.py::test_r4_only_handles_that_are_done_are_released",
    ),
    Mutant(
        "removing a peer frees what is read from it",
        LINK,
        (("        self.wire.destroy()\n", ""),),
        "transfer/test_link.py::test_r5_a_cut_destroys_first_and_makes_every_read_quiet",
    ),
    Mutant(
        "one disconnect is quiet for every other handle",
        LINK,
        (
            (
                "if all(posted.state is HandleState.DISCONNECTED for posted in self._handles):  # R3",
                "if any(posted.state is HandleState.DISCONNECTED for posted in self._handles):",
            ),
        ),
        "transfer/test_link.py::test_r3_a_disconnect_is_quiet_only_when_every_other_handle_has_ended",
    ),
    Mutant(
        "an agent that is still held is called destroyed",
        "pdserve/transfer/nixl.py",
        (("        assert agent() is None, ", "        assert True, "),),
        "transfer/test_nixl.py::test_an_agent_that_outlives_its_cut_is_never_called_quiet",
    ),
    Mutant(
        "an abandoned transfer is quiet at once",
        PULLING,
        (
            (
                '            self._on_pull_events(self._pulls.abandon(transfer_id, "unwanted", time.monotonic()))\n'
                "            return\n",
                '            self._on_pull_events(self._pulls.abandon(transfer_id, "unwanted", time.monotonic()))\n',
            ),
        ),
        "engine/test_transport_thread.py::test_an_abandoned_pull_is_quiet_when_its_last_read_is_over",
    ),
    Mutant(
        "a failed transfer gives its blocks back while they may be written",
        PULL,
        (
            (
                "        if pull.open_reads:\n            return []\n        pull.step(PullStep.FALL_QUIET)\n",
                "        pull.step(PullStep.FALL_QUIET)\n",
            ),
        ),
        "roles/test_failures.py::test_bytes_that_land_after_a_failure_find_blocks_that_nobody_uses",
    ),
    Mutant(
        "a stuck peer may take the whole pool",
        "pdserve/transfer/pieces.py",
        (("self.block_map.block_bytes // 4  # R6", "self.block_map.block_bytes  # R6"),),
        "transfer/test_link.py::test_r6_no_more_than_a_quarter_of_the_slab_is_in_flight",
    ),
    Mutant(
        "a transport closes over reads that can still write",
        THREAD,
        (
            (
                "while not (self._is_closing and self._transport.num_open_reads == 0):",
                "while not self._is_closing:",
            ),
        ),
        "engine/test_transport_thread.py::test_closing_waits_for_reads_that_can_still_write",
    ),
    # ------------------------------------------------------------ life, and bytes
    Mutant(
        "a decode node renews for a rank that stands still",
        DECODE,
        (
            (
                "if not self._rank.is_alive(life_s(self._lease_s, self._rank.longest_round_s)):",
                "if self._rank.lost.is_set():",
            ),
        ),
        "roles/test_life.py::test_a_decode_node_whose_loop_stands_still_renews_nothing",
    ),
    Mutant(
        "a prefill node tells of progress for a rank that stands still",
        PREFILL,
        (
            (
                "if not self.rank.is_alive(life_s(self.lease_s, self.rank.longest_round_s)):",
                "if self.rank.lost.is_set():",
            ),
        ),
        "roles/test_life.py::test_a_prefill_node_whose_loop_stands_still_is_given_up_long_before_the_deadline",
    ),
    Mutant(
        "bytes that differ from their hash are used",
        PULLING,
        (("        if not differing:\n", "        if pull.num_bytes:\n"),),
        "roles/test_checksums.py::test_bytes_that_changed_after_they_were_announced_are_found_and_never_decoded_from",
    ),
    # ------------------------------------------------------------ a rank of several processes
    Mutant(
        "group: a transfer is committed once one part is",
        COVERAGE,
        (("return len(self._committed) == self._num_parts", "return len(self._committed) > 0"),),
        "roles/test_group_failures.py::test_a_transfer_that_one_part_did_not_commit_is_given_up_by_all",
    ),
    Mutant(
        "group: the release is asked for once one part has read everything",
        COVERAGE,
        (("return len(self._pulled) == self._num_parts", "return len(self._pulled) > 0"),),
        "roles/test_group_failures.py::test_nothing_is_released_before_every_part_has_read_everything",
    ),
    Mutant(
        "group: a pull is confirmed before every part has read everything",
        DECODE,
        (
            (
                "            case PullFinished():\n                self._coverage.pull(said.part)\n",
                "            case PullFinished():\n                self._coverage.pull(said.part)\n"
                "                self._rank.tell_transport(ConfirmPull(self._transfer_id, True, 5))\n",
            ),
        ),
        "roles/test_group_failures.py::test_nothing_is_released_before_every_part_has_read_everything",
    ),
    Mutant(
        "group: a lease stands once it does in one part",
        PARTS,
        (("return len(self._opened) == len(self._ends)", "return len(self._opened) == 1"),),
        "roles/test_group_failures.py::test_whatever_order_parts_speak_in_the_decode_node_hears_of_the_lease_first_and_of_"
        "chunks_in_order",
    ),
    Mutant(
        "group: chunks are told before the lease stands in every part",
        PREFILL,
        (
            (
                "            case ChunkAnnounced() if not self._is_accepted:\n",
                "            case ChunkAnnounced() if False:\n",
            ),
        ),
        "roles/test_group_failures.py::test_whatever_order_parts_speak_in_the_decode_node_hears_of_the_lease_first_and_of_"
        "chunks_in_order",
    ),
    Mutant(
        "group: what one part vouches for is valid",
        PARTS,
        (("return all(self._answers.values())", "return any(self._answers.values())"),),
        "roles/test_group_failures.py::test_blocks_that_one_part_does_not_vouch_for_are_never_decoded_from",
    ),
    Mutant(
        "group: the answer of one part is that of all",
        PARTS,
        (("if len(self._answers) == len(self._ends) else None", "if self._answers else None"),),
        "prefill_node/test_handoff.py::test_the_decode_node_is_answered_once_every_part_has_been",
    ),
    Mutant(
        "group: a release is taken before every part has announced everything",
        PARTS,
        (("return all(count == num_chunks", "return any(count == num_chunks"),),
        "prefill_node/test_handoff.py::test_a_release_counts_once_every_part_has_announced_everything",
    ),
    Mutant(
        "group: a lease that one part revoked goes on",
        PREFILL,
        (("                return self._end_with(HandoffAbort(reason))\n", "                return ()\n"),),
        "roles/test_group_failures.py::test_a_lease_that_one_part_revoked_is_told_to_the_decode_node_at_once",
    ),
    Mutant(
        "group: a transfer is quiet once one part is",
        QUORUM,
        (
            (
                'if transfer_id not in self._abandoned or not self._is_last(member, ("quiet", transfer_id)):',
                "if transfer_id not in self._abandoned:",
            ),
        ),
        "roles/test_group_failures.py::test_a_transfer_that_one_part_failed_with_keeps_its_blocks_until_every_part_is_"
        "quiet",
    ),
    Mutant(
        "group: a transfer that every part failed with is quiet before it is given up",
        QUORUM,
        (("if transfer_id not in self._abandoned or not self", "if not self"),),
        "engine/test_quorum.py::test_a_part_that_failed_by_itself_says_so_again_when_the_transfer_is_given_up_and_nothing_"
        "of_it_stays",
    ),
    Mutant(
        "group: a prompt is decoded once one part of it is committed",
        QUORUM,
        (('return [event] if self._is_last(member, ("received", transfer_id)) else []', "return [event]"),),
        "roles/test_group_failures.py::test_nothing_is_decoded_before_every_part_has_committed",
    ),
    Mutant(
        "group: lent blocks are free once one part has let go of them",
        QUORUM,
        (('        if not self._is_last(member, ("ended", request_id)):\n            return []\n', ""),),
        "roles/test_group_failures.py::test_lent_blocks_stay_until_every_part_has_let_go_of_them",
    ),
    Mutant(
        "group: chunks that are faster than the leader's word are lost",
        PULLING,
        (
            (
                "            self._early.setdefault(chunk.transfer_id, []).append(chunk)\n            return\n",
                "            return\n",
            ),
        ),
        "roles/test_group_failures.py::test_a_part_that_hears_of_a_transfer_after_its_chunks_reads_them_all_the_same",
    ),
    Mutant(
        "group: a command reaches the leader's transport alone",
        "pdserve/engine/leading.py",
        (("            follower.send(Relay(command))\n", "            pass\n"),),
        "engine/test_following.py::test_commands_reach_every_transport_and_what_all_of_them_saw_comes_back_once",
    ),
    # ------------------------------------------------------------ who is who
    Mutant(
        "the lease of another stream may be released",
        PREFILL,
        (
            (
                "if not self._is_accepted or message.lease_id != self.lease_id:",
                "if not self._is_accepted:",
            ),
        ),
        "roles/test_protocol.py::test_whatever_a_decode_node_says_wrong_ends_its_stream_and_frees_its_blocks",
    ),
    Mutant(
        "a start meant for another life of the node is taken",
        "prefill_node/service.py",
        (("if start.incarnation != mine.incarnation:", "if not start.incarnation:"),),
        "roles/test_protocol.py::test_a_start_that_does_not_fit_is_refused_with_field_and_values",
    ),
    Mutant(
        "a block outside the peer's slab is read",
        PULL,
        (("if not 0 <= block < coverage.source.num_blocks]", "if block < 0]"),),
        "transfer/test_pull.py::test_a_chunk_out_of_order_or_bounds_is_refused_with_its_values",
    ),
]


if __name__ == "__main__":
    sys.exit(run(MUTANTS, copied=COPIED, folder="tests"))
