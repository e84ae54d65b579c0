"""Which test shows which fault of the log: every case by its id.

`python -c "from tests.faults.index import summary; print(summary())"` tells how many are covered.
"""

from enum import Enum

import attrs


class Verdict(Enum):
    """How a case stands."""

    SHOWN = "shown"
    """A test does exactly that, and it goes well."""
    IMMUNE = "immune by design"
    """It cannot happen here; the test shows why."""
    OPEN = "open"
    """It happens, or may."""
    LATER = "later"
    """What it is about does not exist yet."""


@attrs.frozen
class Case:
    """`tests`: below `tests/`, as `file::function`. `note`: what the verdict does not say."""

    verdict: Verdict
    tests: tuple[str, ...] = ()
    note: str = ""


def summary() -> tuple[int, int]:
    """Cases that are shown or immune, and all cases."""
    covered = sum(case.verdict in (Verdict.SHOWN, Verdict.IMMUNE) for case in CASES.values())
    return covered, len(CASES)


CASES: dict[str, Case] = {
    "KF-01": Case(
        Verdict.SHOWN,
        (
            "faults/test_fences.py::test_offload_before_its_forward_has_run_waits_for_it",
            "faults/test_fences.py::test_offload_without_the_wait_for_the_writer_stores_something_else",
            "faults/test_adversarial_streams.py::test_stepped_pool_on_late_streams_reads_what_was_written",
            "faults/test_adversarial_streams.py::test_pool_on_late_streams_reads_what_was_written",
            "faults/test_adversarial_streams.py::test_late_streams_without_an_order_are_caught",
            "test_host_streams.py::test_gather_that_waits_for_its_writer_copies_what_was_written",
            "test_host_streams.py::test_gather_without_the_wait_for_its_writer_copies_stale_bytes",
        ),
    ),
    "KF-02": Case(
        Verdict.SHOWN,
        (
            "faults/test_fences.py::test_restore_into_pages_that_are_still_read_waits_for_the_reader",
            "faults/test_fences.py::test_restore_without_the_wait_for_the_reader_overwrites_what_is_read",
            "faults/test_fences.py::test_copies_with_nothing_under_way_wait_for_nothing",
            "faults/test_fences.py::test_forwards_on_two_streams_at_a_time_keep_the_order_of_their_fences",
            "faults/test_fences.py::test_forwards_on_two_streams_without_an_order_are_caught",
            "faults/test_adversarial_streams.py::test_stepped_pool_on_late_streams_reads_what_was_written",
            "faults/test_adversarial_streams.py::test_pool_on_late_streams_reads_what_was_written",
            "faults/test_adversarial_streams.py::test_late_streams_without_an_order_are_caught",
            "test_host_streams.py::test_writer_that_waits_for_the_gather_leaves_it_the_old_bytes",
            "test_host_streams.py::test_writer_without_the_wait_for_the_gather_overtakes_it",
        ),
    ),
    "KF-03": Case(
        Verdict.SHOWN,
        (
            "faults/test_fences.py::test_pages_of_a_preempt_that_is_half_done_are_nobody_elses",
            "faults/test_fences.py::test_preempt_that_does_not_wait_for_its_copies_is_caught",
            "test_pool.py::test_pool_forward_waits_for_pages_that_are_on_their_way",
        ),
    ),
    "KF-04": Case(
        Verdict.IMMUNE,
        (
            "faults/test_fences.py::test_sequence_dropped_while_its_offload_is_queued_keeps_its_pages_until_then",
            "faults/test_fences.py::test_sequence_dropped_without_the_wait_for_its_offload_is_caught",
        ),
        "KV has no key of its own: a slot belongs to a chunk, and a sequence on its way is not dropped",
    ),
    "KF-05": Case(
        Verdict.SHOWN,
        (
            "faults/test_fences.py::test_preempt_with_any_copy_told_last_ends_with_that_one",
            "faults/test_fences.py::test_preempt_that_remembers_one_copy_only_is_caught",
            "faults/test_wrong_results.py::test_copy_whose_wait_ran_out_of_time_is_not_taken_for_done",
            "test_pool.py::test_pool_hung_copy_is_given_up_and_its_pages_are_quarantined",
        ),
    ),
    "KF-06": Case(
        Verdict.SHOWN,
        (
            "faults/test_fences.py::test_hazards_of_a_slot_follow_the_slot_and_not_its_owner",
            "faults/test_fences.py::test_hazards_that_are_not_noted_are_caught",
        ),
    ),
    "KF-08": Case(
        Verdict.SHOWN,
        (
            "faults/test_fences.py::test_host_slot_that_a_restore_still_reads_is_not_handed_on",
            "faults/test_fences.py::test_host_slot_without_the_wait_for_its_readers_is_caught",
            "faults/test_fences.py::test_host_slot_that_nobody_has_is_not_given_back",
        ),
    ),
    "KF-11": Case(
        Verdict.IMMUNE,
        (
            "faults/test_fences.py::test_host_copy_that_is_the_only_one_survives_pressure_until_it_is_restored",
            "faults/test_fences.py::test_host_copy_that_anybody_may_reclaim_is_caught",
            "faults/test_fences.py::test_restore_of_what_was_dropped_is_a_typed_miss",
        ),
        "there is no look-up: a copy that is the only one cannot be reclaimed, so nothing has to be pinned",
    ),
    "KF-12": Case(
        Verdict.LATER,
        note="leases: with the remote tier",
    ),
    "KF-13": Case(
        Verdict.SHOWN,
        (
            "faults/test_lost_data.py::test_preempt_with_room_for_one_of_two_chunks_moves_nothing_and_is_refused",
            "faults/test_lost_data.py::test_preempt_that_ignores_what_was_reserved_is_caught",
            "faults/test_lost_data.py::test_preempt_with_one_copy_failing_frees_no_page",
            "faults/test_nth_failure.py::test_pool_with_its_nth_copy_failing_loses_nothing_whichever_it_is",
            "test_pool.py::test_pool_host_tier_full_recomputes_or_refuses_as_configured",
        ),
    ),
    "KF-16": Case(
        Verdict.SHOWN,
        (
            "faults/test_lost_data.py::test_restore_with_one_layer_group_missing_is_undone_whole",
            "test_pool.py::test_pool_windowed_layers_return_what_is_in_the_window",
        ),
        "layer groups with and without a window; groups with a recurrent state do not exist yet",
    ),
    "KF-17": Case(
        Verdict.SHOWN,
        (
            "faults/test_wrong_results.py::test_restore_with_a_failing_chunk_never_shows_what_was_in_the_pages",
            "faults/test_wrong_results.py::test_restore_whose_failure_is_taken_for_done_is_caught",
            "faults/test_nth_failure.py::test_pool_with_its_nth_copy_failing_loses_nothing_whichever_it_is",
            "test_pool.py::test_pool_gated_forward_of_a_failing_restore_is_void",
        ),
    ),
    "KF-18": Case(
        Verdict.SHOWN,
        (
            "test_attention.py::test_merge_empty_parts_gives_the_neutral_element",
            "test_attention.py::test_merge_full_with_empty_passes_through_bit_for_bit",
            "test_attention.py::test_merge_three_with_empty_middle_equals_merge_of_two",
            "test_attention.py::test_merge_decides_row_by_row",
        ),
    ),
    "KF-19": Case(
        Verdict.SHOWN,
        (
            "faults/test_layouts.py::test_memory_in_a_declared_layout_comes_back_byte_for_byte",
            "faults/test_layouts.py::test_memory_in_an_undeclared_layout_is_refused_with_its_shape_and_strides",
            "faults/test_layouts.py::test_memory_given_twice_is_refused_by_the_names_of_both_planes",
            "test_copies.py::test_round_trip_of_a_dtype_through_other_pages_keeps_its_bits",
        ),
    ),
    "KF-21": Case(
        Verdict.SHOWN,
        (
            "faults/test_wrong_results.py::test_restore_from_a_damaged_copy_leaves_everybody_else_as_before",
            "faults/test_wrong_results.py::test_restore_from_a_damaged_copy_without_checksums_is_not_found",
            "test_pool.py::test_pool_empty_sequence_is_preempted_and_resumed_as_a_no_op",
        ),
    ),
    "KF-22": Case(
        Verdict.SHOWN,
        (
            "test_attention.py::test_merge_base_2_part_with_natural_part_equals_one_softmax",
            "test_attention.py::test_merge_base_2_part_taken_for_natural_is_far_off",
            "test_attention.py::test_partial_base_undeclared_or_not_natural_is_refused",
        ),
    ),
    "KF-23": Case(
        Verdict.SHOWN,
        (
            "faults/test_deadlocks.py::test_restores_behind_a_head_that_cannot_run_complete_all_the_same",
            "faults/test_deadlocks.py::test_restores_looked_at_in_the_order_of_the_queue_only_are_caught",
            "test_runner.py::test_runner_without_pages_for_the_last_request_says_so",
        ),
    ),
    "KF-24": Case(
        Verdict.SHOWN,
        (
            "faults/test_deadlocks.py::test_request_larger_than_the_pool_is_refused_at_once_by_its_numbers",
            "faults/test_deadlocks.py::test_request_that_outgrows_the_pool_fails_alone_and_its_pages_come_free",
            "test_runner.py::test_runner_request_that_never_fits_is_refused_and_nothing_is_left_behind",
        ),
    ),
    "KF-26": Case(
        Verdict.SHOWN,
        (
            "faults/test_wrong_results.py::test_restore_from_a_damaged_copy_is_tried_once_a_call_and_others_go_on",
            "test_runner.py::test_runner_wrong_checksum_runs_the_tokens_again",
        ),
        "a bad copy in the host tier; files with the disk tier",
    ),
    "KF-27": Case(
        Verdict.SHOWN,
        (
            "faults/test_errors.py::test_copy_that_fails_on_its_second_page_fails_everybody_who_waits_for_it",
            "faults/test_errors.py::test_event_that_raises_anything_breaks_the_pool_and_kills_no_thread",
            "faults/test_errors.py::test_invariant_that_does_not_hold_breaks_the_pool_for_everybody",
            "faults/test_errors.py::test_command_that_cannot_be_carried_out_breaks_the_pool",
            "faults/test_errors.py::test_move_that_the_table_refuses_breaks_the_pool",
            "faults/test_errors.py::test_observer_that_raises_breaks_the_pool_by_its_own_name",
            "faults/test_errors.py::test_stepped_pool_that_breaks_says_so_at_every_call",
            "faults/test_errors.py::test_call_that_begins_to_wait_after_the_end_does_not_wait",
        ),
    ),
    "KF-28": Case(
        Verdict.SHOWN,
        (
            "faults/test_starvation.py::test_restore_of_low_priority_comes_within_as_many_rounds_as_it_is_low",
            "faults/test_starvation.py::test_restore_that_does_not_age_waits_for_ever",
            "faults/test_starvation.py::test_restore_of_lowest_priority_does_not_shut_fresh_ones_out",
            "faults/test_starvation.py::test_sequence_that_has_just_come_back_ranks_behind_one_that_has_not_been_preempted",
            "test_round_robin.py::test_round_robin_minimum_run_outlasts_a_shorter_quantum",
            "test_round_robin.py::test_round_robin_eight_equal_requests_on_five_slots_all_progress",
            "test_round_robin.py::test_round_robin_arrivals_neither_starve_nor_overtake_who_waits",
        ),
    ),
    "KF-29": Case(
        Verdict.SHOWN,
        (
            "faults/test_starvation.py::test_victims_chosen_are_just_enough",
            "faults/test_starvation.py::test_victims_for_a_forward_leave_nobody_stalled",
            "faults/test_starvation.py::test_runner_with_too_few_pages_stalls_nobody_unless_pages_are_on_their_way",
        ),
    ),
    "KF-31": Case(
        Verdict.SHOWN,
        (
            "faults/test_leaks.py::test_pages_handed_out_are_copies_of_their_own",
            "faults/test_leaks.py::test_ledger_over_many_owners_keeps_nothing",
            "faults/test_leaks.py::test_core_over_many_sequences_keeps_nothing",
            "faults/test_leaks.py::test_pool_over_many_sequences_keeps_nothing",
            "faults/test_leaks.py::test_stepped_pool_over_many_sequences_keeps_nothing",
        ),
    ),
    "KF-33": Case(
        Verdict.SHOWN,
        (
            "faults/test_leaks.py::test_restore_cancelled_with_its_copies_under_way_frees_its_pages_once_they_end",
            "faults/test_leaks.py::test_restore_cancelled_that_does_not_wait_for_its_copies_is_caught",
            "faults/test_leaks.py::test_restore_cancelled_whose_copies_never_end_is_let_go_at_the_deadline",
        ),
    ),
    "KF-34": Case(
        Verdict.IMMUNE,
        (
            "faults/test_leaks.py::test_resume_of_what_is_there_a_thousand_times_holds_nothing",
            "faults/test_leaks.py::test_restore_given_up_between_its_wish_and_its_pages_holds_nothing",
            "faults/test_leaks.py::test_release_of_what_was_released_is_refused_at_the_faulty_call",
            "faults/test_leaks.py::test_completion_told_twice_or_of_a_copy_that_never_was_is_counted_and_ignored",
        ),
        "looking a copy up takes no pin, and there is no staging memory to run out of",
    ),
    "KF-36": Case(
        Verdict.SHOWN,
        (
            "faults/test_cancellation.py::test_restore_aborted_at_any_point_frees_its_pages_once_and_never_early",
            "faults/test_cancellation.py::test_restore_aborted_that_frees_its_pages_at_once_is_caught",
            "test_pool_cancel.py::test_call_cancelled_anywhere_is_done_or_undone",
        ),
    ),
    "KF-37": Case(
        Verdict.IMMUNE,
        (
            "faults/test_cancellation.py::test_offload_and_restore_that_share_a_chunk_cancelled_together_end_in_any_order",
            "faults/test_leaks.py::test_completion_told_twice_or_of_a_copy_that_never_was_is_counted_and_ignored",
        ),
        "a sequence has one offload or one restore at a time",
    ),
    "KF-38": Case(
        Verdict.SHOWN,
        (
            "faults/test_cancellation.py::test_cancel_in_any_state_twice_is_legal_and_changes_nobody_else",
            "faults/test_cancellation.py::test_finish_in_any_state_ends_once_and_changes_nobody_else",
            "faults/test_cancellation.py::test_finish_of_one_sequence_by_two_tasks_ends_for_both",
        ),
    ),
    "KF-39": Case(
        Verdict.SHOWN,
        (
            "faults/test_cancellation.py::test_forward_cancelled_as_its_pages_come_passes_them_to_the_next",
            "faults/test_cancellation.py::test_bucket_with_copies_given_back_at_any_time_conserves_its_bytes",
            "faults/test_cancellation.py::test_preempt_cancelled_with_a_bucket_in_its_way_gives_its_turn_to_the_next",
            "test_pool_cancel.py::test_preempt_with_a_plain_task_cancel_in_the_moment_of_success_succeeds_first",
        ),
    ),
    "KF-41": Case(
        Verdict.LATER,
        note="files: with the disk tier; copies of the host tier are held to their end by the cancel sweep",
    ),
    "KF-43": Case(
        Verdict.SHOWN,
        (
            "faults/test_errors.py::test_evicted_sequence_is_a_miss_everywhere_and_holds_nothing",
            "faults/test_errors.py::test_preempt_without_room_is_counted_or_refused_never_silent",
            "faults/test_errors.py::test_drain_with_nothing_under_way_returns_at_once",
        ),
        "the device and the host tier are all there is; other tiers with their features",
    ),
    "KF-45": Case(
        Verdict.LATER,
        note="short counts and alignment: with the disk tier",
    ),
    "KF-47": Case(
        Verdict.LATER,
        ("faults/test_lost_data.py::test_host_tier_offered_more_than_it_holds_never_holds_more",),
        "ENOSPC and left-over files: with the disk tier; the host tier's cap is shown",
    ),
    "KF-48": Case(
        Verdict.LATER,
        note="probing of paths to a file: with the disk tier and GPU direct storage",
    ),
    "KF-50": Case(
        Verdict.SHOWN,
        (
            "faults/test_leaks.py::test_pinned_memory_takes_what_was_asked_for_and_a_page",
            "faults/test_leaks.py::test_pool_allocates_its_host_tier_once_and_reports_its_size",
        ),
    ),
    "KF-52": Case(
        Verdict.SHOWN,
        (
            "faults/test_errors.py::test_restore_of_many_chunks_keeps_few_copies_under_way",
            "faults/test_errors.py::test_calls_with_every_copy_held_up_never_block_the_loop",
            "test_host_device.py::test_full_queue_is_refused_and_takes_work_again_once_some_is_over",
        ),
        "page tables are host memory here; uploads of them come with the CUDA device",
    ),
    "KF-53": Case(
        Verdict.SHOWN,
        (
            "faults/test_starvation.py::test_victims_are_ranked_by_what_each_costs_to_bring_back",
            "faults/test_starvation.py::test_victims_chosen_are_just_enough",
            "faults/test_starvation.py::test_preempt_of_a_clean_victim_copies_nothing",
        ),
    ),
    "KF-54": Case(
        Verdict.SHOWN,
        (
            "faults/test_lost_data.py::test_requests_with_a_host_tier_for_one_or_none_all_finish",
            "test_runner.py::test_runner_full_host_tier_replays_what_was_dropped",
        ),
    ),
    "KF-56": Case(
        Verdict.SHOWN,
        (
            "test_ranks.py::test_every_rank_is_told_the_same_copies",
            "test_ranks.py::test_pages_of_a_preempt_stay_held_until_every_rank_has_acknowledged",
            "test_ranks.py::test_pages_without_the_wait_for_all_ranks_are_given_back_too_early",
            "test_ranks.py::test_failure_on_one_rank_fails_everywhere_once_all_have_ended",
            "test_ranks_gloo.py::test_host_pool_that_is_a_chunk_smaller_on_one_rank_binds_both",
        ),
    ),
    "KF-58": Case(
        Verdict.LATER,
        note="KV is private to its sequence's name; keys and tenants come with tiers that share",
    ),
    "KF-60": Case(
        Verdict.LATER,
        note="nothing is stored in files; with the disk tier",
    ),
    "KF-61": Case(
        Verdict.LATER,
        note="nothing is named across processes; with the tiers that persist",
    ),
    "KF-63": Case(
        Verdict.SHOWN,
        (
            "faults/test_errors.py::test_call_that_begins_to_wait_after_the_end_does_not_wait",
            "faults/test_shutdown.py::test_close_in_any_state_ends_and_leaves_no_thread",
            "faults/test_shutdown.py::test_close_asked_for_by_two_tasks_is_over_for_both_when_it_is_over",
            "faults/test_shutdown.py::test_pool_opened_twenty_times_in_a_process_is_as_new",
            "faults/test_shutdown.py::test_close_of_a_device_that_hangs_names_it_and_ends",
            "faults/test_shutdown.py::test_close_of_a_stepped_pool_whose_device_hangs_names_it_and_ends",
            "faults/test_shutdown.py::test_close_of_a_device_that_raises_leaves_no_thread_of_the_pool",
            "test_pool.py::test_pool_closed_under_a_waiting_call_ends_it",
            "test_host_device.py::test_close_with_a_stuck_callable_names_its_stream_and_fails_what_is_left",
        ),
    ),
    "KF-64": Case(
        Verdict.SHOWN,
        (
            "faults/test_shutdown.py::test_close_with_every_worker_thread_of_the_program_blocked_ends",
            "faults/test_shutdown.py::test_copy_that_blocks_for_ever_does_not_hold_up_the_end_of_the_loop",
        ),
    ),
}
