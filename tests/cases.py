"""Known faults of this field, and the tests that keep them out. Run by `make check`, shown in docs/cases.md.

A case is a public report of a fault in a system like ours (repository#number), turned into an input and its
one right outcome. `python -m tests.cases` prints the tests for pytest.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Case:
    """One fault."""

    number: int
    rule: str
    """The right outcome."""
    reports: str
    tests: tuple[str, ...]
    """`file::test`, below tests/."""


def _case(number: int, rule: str, reports: str, *tests: str) -> Case:
    return Case(number, rule, reports, tests)


ADV, LOSS, BATCH = "unit/test_advantages.py", "unit/test_losses.py", "unit/test_batch.py"
TRAINER, ENGINE, LOADS = "unit/test_trainer.py", "unit/test_torch_engine.py", "unit/test_engine_weights.py"
ADMISSION, EPISODE, WORKER = "unit/test_admission.py", "unit/test_episode.py", "unit/test_worker.py"
PLAY, BUS, FAULTS = (
    "integration/test_environment.py",
    "integration/test_bus.py",
    "integration/test_bus_faults.py",
)
STATE, GATEWAY, RECIPE = "integration/test_state.py", "integration/test_gateway.py", "unit/test_recipe.py"
CHECKPOINT, WEIGHTS, SCORING = "unit/test_checkpoint.py", "unit/test_weights.py", "unit/test_scoring.py"
SESSIONS, FOLLOWING, ROUTER = (
    "integration/test_sessions.py",
    "integration/test_following.py",
    "integration/test_router.py",
)
CONTRACT, CONTRACT_LOADS, SPLIT = (
    "engine_contract/test_contract_requests.py",
    "engine_contract/test_contract_weights.py",
    "engine_contract/test_contract_split.py",
)
STRATEGIES, TOKENS, SAMPLING = (
    "unit/test_router_strategies.py",
    "unit/test_tokens.py",
    "unit/test_sampling.py",
)

CASES = (
    _case(1, "An all-equal group has advantages of exactly 0 and is counted", "trl#6365, AReaL#1619",
          f"{ADV}::test_all_equal_group_is_exactly_zero_and_leaves_the_others_alone",
          f"{TRAINER}::test_groups_without_a_gradient_are_counted_and_change_nothing"),
    _case(2, "Groups are normalised by the population standard deviation", "AReaL#1619",
          f"{ADV}::test_standard_deviation_is_that_of_the_population"),
    _case(3, "Groups are formed by id, uneven ones too", "slime#1918, #1414, #1655",
          f"{ADV}::test_uneven_groups_each_have_mean_zero",
          f"{ADV}::test_equal_group_of_three_between_groups_of_four_is_exactly_zero",
          f"{ADV}::test_order_of_arrival_changes_nothing"),
    _case(4, "A rollout split into segments counts once in the baseline", "miles#2378, slime#2062",
          f"{ADV}::test_a_rollout_in_several_segments_counts_once_in_the_baseline"),
    _case(13, "The loss does not depend on the micro-batch split", "mlx-lm#1413, open-instruct#1161",
          f"{LOSS}::test_token_mean_does_not_depend_on_the_split",
          f"{TRAINER}::test_result_does_not_depend_on_micro_batches_or_order"),
    _case(15, "Masked truncated tokens leave the denominator too", "trl#6369",
          f"{LOSS}::test_masked_truncated_tokens_leave_the_denominator",
          f"{TRAINER}::test_masked_truncated_trajectories_stay_in_their_groups_statistics"),
    _case(17, "NaN at masked positions is harmless, at others reported", "OpenRLHF#1240, verl#6361",
          f"{LOSS}::test_masked_poison_changes_neither_loss_nor_gradient_nor_metrics",
          f"{LOSS}::test_unmasked_nonfinite_is_counted_and_never_repaired"),
    _case(21, "Environment text is never in the loss", "slime#1418, trl#5832",
          f"{BATCH}::test_environment_text_is_outside_the_mask_whatever_its_ids"),
    _case(22, "Generated length is the sum of the mask", "OpenRLHF#1252",
          f"{BATCH}::test_generated_length_is_the_sum_of_the_mask"),
    _case(24, "Per-token arrays are aligned, or refused by name", "verl#6089",
          f"{BATCH}::test_array_that_was_not_cut_with_the_others_is_refused_by_name"),
    _case(27, "The mask is stored, never inferred from token values", "trl#4970, rl#3578",
          f"{BATCH}::test_mask_comes_from_the_trajectory_where_pad_equals_end_of_turn"),
    _case(29, "At the end of the context the episode ends, and says so", "Trinity-RFT#608",
          f"{EPISODE}::test_a_turn_cut_by_the_window_is_the_last_and_its_action_is_not_played",
          f"{PLAY}::test_context_is_clipped_and_a_full_window_ends_the_episode"),
    _case(30, "New tokens are clipped to the window", "tinker-cookbook#506",
          f"{ENGINE}::test_the_context_window_clips_and_is_told",
          f"{EPISODE}::test_a_finished_episode_keeps_its_reward_however_long_its_last_answer_was"),
    _case(34, "Log-probabilities are of the distribution after temperature", "trl#4159, prime-rl#697",
          f"{SAMPLING}::test_logprob_is_of_the_distribution_after_temperature",
          f"{CONTRACT}::test_each_logprob_is_that_of_the_distribution_drawn_from",
          f"{TRAINER}::test_temperature_divides_logits_before_the_softmax"),
    _case(36, "A NaN from the engine costs its own turn; nothing but NaN ends the worker", "trl#6693",
          f"{ENGINE}::test_logits_that_are_not_finite_fail_their_request_alone",
          f"{WORKER}::test_an_engine_that_gives_nothing_but_nan_ends_its_worker_with_the_rest_unacknowledged",
          f"{BATCH}::test_unusable_logprob_of_a_sampled_token_is_refused"),
    _case(38, "What was used to generate is used to score", "prime-rl#2786",
          f"{BATCH}::test_survives_the_wire_and_rejects_null_logprobs",
          f"{TRAINER}::test_equal_weights_give_ratio_one_at_any_temperature",
          f"{TRAINER}::test_a_sampler_that_is_not_the_trained_policy_raises_the_alarm_at_equal_weights_only"),
    _case(40, "Sampled ids are kept verbatim through all turns", "trl#5224, slime#117, verl#6719",
          f"{TOKENS}::test_each_prompt_starts_with_the_prompt_and_the_sampled_ids_before_it",
          f"{EPISODE}::test_sampled_ids_are_in_every_later_prompt_as_they_were_sampled",
          f"{SESSIONS}::test_a_conversation_becomes_one_trajectory_of_exactly_what_was_sampled"),
    _case(43, "Lag n is accepted at limit n, n + 1 is not", "prime-rl#1902",
          f"{ADMISSION}::test_lag_equal_to_the_limit_is_accepted_and_one_more_is_stale"),
    _case(44, "Time in the queue counts; only the stale episode drops", "prime-rl#3009",
          f"{ADMISSION}::test_samples_that_went_stale_in_the_queue_are_dropped_at_consumption_and_issued_again",
          f"{ADMISSION}::test_only_the_stale_episode_drops_not_its_group"),
    _case(46, "Finished work is never thrown away in silence", "AReaL#1481",
          f"{BUS}::test_over_the_limit_partitions_pause_while_the_membership_goes_on_and_then_resume",
          f"{FAULTS}::test_events_that_the_broker_dropped_unread_are_counted_as_lost"),
    _case(47, "What a batch leaves is first in the next, nothing twice", "slime#2238",
          f"{ADMISSION}::test_a_batch_leaves_the_other_ready_groups_for_the_next_and_none_is_seen_twice"),
    _case(50, "A rollout that never returns frees its slot and its group", "NeMo-RL#3238, miles#1012",
          f"{PLAY}::test_an_environment_that_hangs_frees_its_slot_and_delays_no_other",
          f"{ADMISSION}::test_a_group_that_one_rollout_holds_up_is_completed_without_it_after_the_deadline"),
    _case(52, "A prompt that always fails is given up and replaced", "NeMo-RL#3938, rllm#280",
          f"{ADMISSION}::test_a_prompt_that_always_fails_is_given_up_and_replaced_by_another_of_its_task"),
    _case(60, "A late result of an earlier attempt or try is discarded", "agent-lightning#83",
          f"{ADMISSION}::test_a_late_result_of_an_earlier_attempt_is_acknowledged_and_left_out",
          f"{EPISODE}::test_a_retryable_failure_and_a_silent_try_are_asked_again_and_late_replies_dropped"),
    _case(64, "No KV of old weights survives a load", "NeMo-RL#4018, vllm#9744",
          f"{LOADS}::test_no_kv_of_old_weights_survives_a_load",
          f"{CONTRACT_LOADS}::test_requests_in_flight_go_on_under_the_new_weights",
          f"{SPLIT}::test_kv_of_another_version_is_computed_again"),
    _case(66, "A failed load leaves the old version live and labelled", "prime-rl#3050",
          f"{LOADS}::test_a_failed_load_leaves_the_old_version_live_and_labelled",
          f"{CONTRACT_LOADS}::test_a_failed_load_leaves_the_old_version_live_and_labelled",
          f"{WORKER}::test_a_failed_load_leaves_the_old_version_live_and_labelled"),
    _case(69, "Weights in several buckets come back equal", "SkyRL#1737",
          f"{WEIGHTS}::test_tensors_in_several_buckets_come_back_equal"),
    _case(71, "A half-written version is never read", "prime-rl#3316",
          f"{WEIGHTS}::test_a_half_written_version_is_refused",
          f"{WEIGHTS}::test_a_later_attempt_at_the_same_version_changes_nothing_of_the_published_one",
          f"{FOLLOWING}::test_of_two_updates_in_quick_succession_only_the_newer_is_loaded"),
    _case(73, "Policy versions only grow", "cosmos-rl#503, miles#2835",
          f"{STATE}::test_a_policy_version_only_grows"),
    _case(82, "An action that cannot be read is not executed; its tokens stay trained", "verifiers#1763",
          f"{PLAY}::test_an_action_that_cannot_be_read_is_an_observation_and_its_tokens_stay_trained"),
    _case(84, "The same seed gives the same episode beside others", "OpenEnv#1078",
          f"{PLAY}::test_a_group_shares_its_episode_and_neighbours_do_not_disturb_it"),
    _case(87, "A failure has no reward, a real zero is 0.0", "OpenEnv#1025, NeMo-RL#2207",
          f"{SCORING}::test_a_trajectory_that_did_not_end_by_itself_has_no_reward",
          f"{SCORING}::test_a_truncated_trajectory_keeps_its_reward_and_a_real_failure_is_zero"),
    _case(89, "Only finite rewards within bounds are rewards", "OpenEnv#1199",
          f"{SCORING}::test_only_finite_values_in_bounds_are_rewards_in_the_service_and_in_a_child"),
    _case(91, "A spinning scorer is killed at its limit", "verl#288, NeMo-Gym#1354",
          f"{SCORING}::test_a_spinning_scorer_is_killed_at_its_limit_and_the_next_gradings_are_normal"),
    _case(96, "Slow handling does not cost the membership", "confluent-kafka-python#552",
          f"{BUS}::test_a_handler_longer_than_the_poll_interval_keeps_the_membership"),
    _case(100, "A trajectory delivered three times counts once", "alpakka-kafka#1038",
          f"{ADMISSION}::test_a_trajectory_delivered_three_times_counts_once"),
    _case(101, "A poison message goes to the dead letters and holds nothing up", "SREGym#790",
          f"{FAULTS}::test_poison_goes_to_deadletters_with_reason_and_origin_and_holds_nothing_up"),
    _case(102, "Nothing is lost for its size", "librdkafka#3125",
          f"{FAULTS}::test_a_payload_at_the_limit_travels_inline_and_one_byte_more_by_reference",
          f"{FAULTS}::test_an_event_the_broker_refuses_ends_the_process"),
    _case(104, "Events from before a group or on a new partition are received", "librdkafka#1852",
          f"{BUS}::test_events_from_before_the_group_are_received",
          f"{BUS}::test_a_partition_that_is_added_loses_nothing"),
    _case(108, "State is learned again within the interval after Redis was away", "redis-py#1464",
          f"{STATE}::test_redis_down_for_seconds_kills_no_loop_and_is_learned_from_within_the_interval"),
    _case(110, "A trainer whose lease was taken over cannot publish", "redis-py#3532",
          f"{STATE}::test_a_trainer_whose_lease_was_taken_over_cannot_publish"),
    _case(112, "A worker that answers nobody is ejected", "production-stack#749, router#197",
          f"{STRATEGIES}::test_a_try_that_passed_its_deadline_ejects_a_worker_that_answered_nobody_since",
          f"{ROUTER}::test_a_worker_that_answers_nothing_is_ejected_and_its_turns_run_once_elsewhere"),
    _case(114, "Ids are unique; an abort touches no newer request", "vllm#10583",
          f"{ENGINE}::test_an_abort_frees_its_own_request_and_no_newer_one",
          f"{CONTRACT}::test_an_abort_frees_its_own_request_and_no_newer_one",
          f"{WORKER}::test_a_later_try_ends_the_earlier_one_and_touches_no_other_turn"),
    _case(117, "A client that leaves ends its generation within 2 s", "vllm#10087, fastapi#3766",
          f"{SESSIONS}::test_generation_ends_soon_after_its_client_has_left"),
    _case(119, "A misspelt or misplaced key is refused by name", "Soup#627, SkyRL#1459",
          f"{RECIPE}::test_each_mistake_is_told_by_its_key_and_its_fix",
          "unit/test_settings.py::test_a_misspelt_variable_is_told_with_the_right_one"),
    _case(120, "NaN, infinity and absurd numbers are refused with valid JSON", "fastapi#459",
          f"{RECIPE}::test_no_number_takes_what_is_none_or_absurd",
          f"{GATEWAY}::test_each_wrong_input_is_refused_by_name_and_nothing_is_stored"),
    _case(121, "Text that cannot be encoded is refused at every entry", "Rapid-MLX#730",
          f"{RECIPE}::test_text_that_cannot_be_stored_is_refused_wherever_it_is",
          f"{TOKENS}::test_text_that_cannot_be_encoded_is_invalid",
          "unit/test_codec.py::test_text_that_utf8_cannot_hold_is_refused_at_the_producer"),
    _case(123, "One idempotency key makes one run", "jarvis#743",
          f"{GATEWAY}::test_one_key_makes_one_run_however_often_it_is_sent"),
    _case(127, "Open streams do not hold up a shutdown", "uvicorn#451",
          "integration/test_host.py::test_sigterm_with_an_open_event_stream_exits_0_within_the_grace"),
    _case(133, "Two steps, a load and two steps equal four", "Automodel#763",
          f"{TRAINER}::test_two_steps_resume_two_steps_equals_four_steps"),
    _case(135, "A kill or a full disk while saving costs no checkpoint", "Automodel#3390",
          f"{CHECKPOINT}::test_kill_at_any_file_operation_leaves_the_old_or_the_new_one_loadable",
          f"{CHECKPOINT}::test_full_disk_is_an_error_that_leaves_the_old_one_alone"),
    _case(151, "A scorer that does not apply gives no reward", "trl#3079",
          f"{SCORING}::test_a_scorer_that_cannot_be_had_is_a_reason_not_an_exception"),
)  # fmt: skip


def node_ids() -> list[str]:
    """For pytest, each once, by file: fixtures of a module are made once."""
    return sorted({f"tests/{test}" for case in CASES for test in case.tests})


def page() -> str:
    """docs/cases.md."""
    lines = [
        "<!-- Made by `make docs`; edit tests/cases.py. -->\n",
        "# Known faults of this field\n",
        "Reports of faults in systems like ours, the right outcome of each, and the tests that keep it.",
        "`make check` runs them.\n",
        "| | the right outcome | reported as | tests |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        tests = "<br>".join(f"[`{t.split('::')[1]}`](../tests/{t.split('::')[0]})" for t in case.tests)
        lines.append(f"| {case.number} | {case.rule} | {case.reports} | {tests} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print("\n".join(node_ids()))
