"""The mutants that mutants.py applies: one plausible fault each.

A row is (name, original text, changed text, tests that find it). The original text occurs exactly once in its file. A change of the
code that moves or rewrites it re-anchors the mutant here, in a commit that changes nothing else and shows that it is still killed.
"""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    original: str
    changed: str
    tests: tuple[str, ...]


def _of(file: str, test_file: str, *rows: Row) -> list[Mutant]:
    return [
        Mutant(name, file, original, changed, tuple(f"{test_file}::{test}" for test in tests))
        for name, original, changed, *tests in rows
    ]


MUTANTS = [
    *_of(
        "asyncrl/manager/admission.py",
        "tests/unit/test_ledger.py",
        ("gate-ignores-that-servers-are-behind", "behind = max(0, trained - served)", "behind = 0", "test_gate"),
        ("gate-admits-one-too-many", "if fresh <= 0:", "if fresh < 0:", "test_gate"),
        (
            "gate-grants-the-larger-of-both-rooms",
            'return min(fresh, idle), ""',
            'return max(fresh, idle), ""',
            "test_the_room_of_the_gate_is_the_smaller_of_its_bounds",
        ),
        (
            "prompts-are-issued-that-no-step-has-ordered",
            "min(self.before, Locator(self.num_epochs, 0))",
            "Locator(self.num_epochs, 0)",
            "test_only_ordered_prompts_are_issued_with_the_size_that_is_ordered",
        ),
    ),
    *_of(
        "asyncrl/master/generating.py",
        "tests/unit/test_generating_step.py",
        (
            "a-step-may-take-the-end-of-the-run-for-an-error",
            "class NoBatch(BaseException):",
            "class NoBatch(Exception):",
            "test_a_function_cannot_go_on_without_a_batch",
        ),
        (
            "a-step-generates-longer-responses-than-are-planned",
            "if not 1 <= longest <= configured.max_new_tokens:",
            "if not 1 <= longest:",
            "test_what_is_wrong_in_a_step_is_named_with_its_line",
        ),
    ),
    *_of(
        "asyncrl/master/trainer.py",
        "tests/unit/test_generating_step.py",
        (
            "a-run-ends-once-all-prompts-of-a-step-are-rejected",
            "if self._leaving.is_set() or executor.generates:",
            "if self._leaving.is_set():",
            "test_each_step_orders_what_the_steps_before_have_left",
        ),
    ),
    *_of(
        "asyncrl/manager/ledger.py",
        "tests/unit/test_ledger.py",
        (
            "a-late-report-takes-an-order-back",
            "self._order.before < order.before",
            "self._order != order",
            "test_the_same_order_again_and_an_older_one_change_nothing",
        ),
        (
            "a-finished-rollout-still-counts-as-running",
            "            self._num_running -= 1\n",
            "",
            "test_stored_but_not_running_does_not_count_for_capacity",
        ),
        (
            "a-prompt-is-handed-out-once-too-often",
            "live.ticket.issue >= self._max_issues:",
            "live.ticket.issue > self._max_issues:",
            "test_released_prompts_go_first_and_at_most_max_issues_times",
        ),
        (
            "a-repeated-request-gets-new-tickets",
            "            self._remember(holder, request.request_id, tickets)\n",
            "            pass\n",
            "test_the_same_request_gets_the_same_tickets",
        ),
        (
            "a-repeated-heartbeat-counts-twice",
            "repeated = now - holder.last_heartbeat < self._heartbeat_s / 2",
            "repeated = False",
            "test_tickets_not_listed_twice_are_released",
        ),
        (
            "a-dropped-trajectory-is-taken-back-by-an-old-report",
            "name.attempt != self.attempt or ticket_id in self._dropped:",
            "name.attempt != self.attempt:",
            "test_a_stored_ticket_that_the_master_drops_is_handed_out_again",
        ),
    ),
    *_of(
        "asyncrl/master/batch.py",
        "tests/unit/test_batch_former.py",
        (
            "a-step-starts-with-one-batch-too-many-due",
            "too_many = len(due) - (deadline - version) * self._batch_size",
            "too_many = len(due) - (deadline - version + 1) * self._batch_size",
            "test_waits_for_a_straggler_that_would_be_too_old",
        ),
        (
            "prompts-before-deadlines",
            "key=lambda ticket: (ticket.deadline, ticket.locator, ticket.ticket_id)",
            "key=lambda ticket: (ticket.locator, ticket.deadline, ticket.ticket_id)",
            "test_the_earliest_deadlines_in_canonical_order",
        ),
        (
            "a-batch-is-not-in-canonical-order",
            "tuple(sorted(locators, key=lambda ticket_id: (locators[ticket_id], ticket_id)))",
            "tuple(locators)",
            "test_a_batch_is_in_the_order_of_its_prompts_and_not_of_its_deadlines",
        ),
        (
            "stored-tickets-are-given-up-before-running-ones",
            "key=lambda ticket: not ticket.worker)[:over]",
            "key=lambda ticket: bool(ticket.worker))[:over]",
            "test_more_tickets_than_fit_before_their_deadline",
        ),
        (
            "an-unknown-ticket-is-as-old-as-its-newest-token",
            "WeightVersion.unpack(min(meta.version_start)).version",
            "WeightVersion.unpack(max(meta.version_start)).version",
            "test_a_ticket_that_the_ledger_does_not_know_is_as_old_as_its_oldest_token",
        ),
        (
            "the-last-batch-does-not-wait-for-what-runs",
            "            if pending or not exhausted:",
            "            if not exhausted:",
            "test_the_last_batch_is_partial",
        ),
        (
            "drop-trusts-an-old-ledger",
            'self._overdue == "drop" and current else',
            'self._overdue == "drop" else',
            "test_drop_waits_for_a_ledger_that_lists_the_stored_tickets",
        ),
    ),
    *_of(
        "asyncrl/runtime/channel_protocol.py",
        "tests/unit/test_channel.py",
        (
            "settled-bytes-stay-in-the-credit",
            "            return None\n        self.pending_bytes -= out.nbytes\n",
            "            return None\n",
            "TestSendWindow::test_credit_in_items_and_bytes",
        ),
        (
            "a-new-receiver-inherits-the-number-of-sends",
            "            out.sent_at = now\n            out.num_sends = 1\n",
            "            out.sent_at = now\n",
            "TestSendWindow::test_each_receiver_has_its_own_limit_of_resends",
        ),
        (
            "a-new-receiver-counts-as-heard",
            "        self.answered = False\n        self._query_interval_s",
            "        self._query_interval_s",
            "TestSendWindow::test_a_silent_receiver_is_queried_though_nothing_is_pending",
        ),
        (
            "a-settled-message-gets-no-verdict-again",
            'return self._verdicts[seq] or "held"',
            'return "held"',
            "TestPeerLedger::test_every_kind_of_arrival",
        ),
        (
            "a-forgotten-message-counts-as-held-whatever-its-verdict",
            "            if self._verdicts.pop(seq) is None:\n                self.num_held -= 1",
            "            self._verdicts.pop(seq)\n            self.num_held -= 1",
            "TestPeerLedger::test_only_unsettled_messages_are_held",
        ),
        (
            "what-the-sender-has-given-up-is-asked-for",
            "            if seq < self._low:\n                continue\n",
            "",
            "TestPeerLedger::test_answers_a_resend_query",
        ),
        (
            "a-message-that-was-skipped-is-kept",
            "if seq >= max(self._next, low):",
            "if seq >= low:",
            "TestInOrder::test_skips_messages_that_the_sender_gave_up",
        ),
    ),
    *_of(
        "asyncrl/manager/routing.py",
        "tests/unit/test_routing.py",
        (
            "equals-go-to-the-same-server-again",
            "first = bisect.bisect_right(",
            "first = bisect.bisect_left(",
            "test_round_robin",
        ),
        (
            "an-overfull-server-takes-the-room-of-others",
            "sum(max(0, self.max_groups - server.running) for",
            "sum(self.max_groups - server.running for",
            "test_a_server_above_its_limit_does_not_reduce_the_room_of_others",
        ),
        (
            "a-server-may-serve-older-weights",
            "version is not None and version.version >= min_version",
            "version is not None",
            "test_only_servers_with_the_version_or_a_newer_one",
        ),
        (
            "the-served-version-goes-back",
            "if version.version > self.served:",
            "if version.version != self.served:",
            "test_served_version_never_goes_back",
        ),
        (
            "a-stale-server-never-dies",
            "waiting_for = (ServerState.SUSPECT, ServerState.STALE, ServerState.DRAINING)",
            "waiting_for = (ServerState.SUSPECT, ServerState.DRAINING)",
            "test_a_server_that_has_never_served_is_dead_after_a_long_silence",
        ),
    ),
    *_of(
        "asyncrl/manager/routing.py",
        "tests/unit/test_slow_servers.py",
        (
            "slow-and-quick-again-are-swapped",
            "(_QUICK_AGAIN if server.pace.slow else _SLOW)",
            "(_SLOW if server.pace.slow else _QUICK_AGAIN)",
            "test_a_slow_server_is_quick_again_below_a_lower_bound",
        ),
    ),
    *_of(
        "asyncrl/manager/update_plan.py",
        "tests/unit/test_update_plan.py",
        (
            "the-outcome-of-an-earlier-process-counts",
            "if running is not None and running.incarnation == update.incarnation:",
            "if running is not None:",
            "test_the_load_of_a_server_that_dies_is_void_and_its_successor_loads_at_once",
        ),
        (
            "weights-of-an-attempt-that-is-over-are-published",
            "if self._table.attempts.is_over(version.attempt) or not self._on_disk.adopt(version):",
            "if not self._on_disk.adopt(version):",
            "test_a_version_of_an_attempt_that_is_over_is_refused",
        ),
        (
            "a-small-fraction-updates-no-server",
            "max(1, int(self._fraction * alive))",
            "int(self._fraction * alive)",
            "test_the_load_of_a_server_that_dies_is_void_and_its_successor_loads_at_once",
        ),
        (
            "servers-that-serve-nothing-wait-for-a-wave",
            "or (serving and room < 1):",
            "or room < 1:",
            "test_a_server_that_leaves_loads_nothing_and_counts_in_no_wave",
        ),
        (
            "a-wave-has-no-end",
            "            room -= serving\n",
            "",
            "test_waves_keep_the_rest_serving",
        ),
    ),
    *_of(
        "asyncrl/manager/update_plan.py",
        "tests/unit/test_broadcast_plan.py",
        (
            "half-a-broadcast-version-may-go-back",
            "or on_disk < least:",
            "or on_disk.attempt < least.attempt:",
            "test_a_server_whose_broadcast_failed_is_stale_until_that_version_is_on_disk",
        ),
    ),
    *_of(
        "asyncrl/dataflow/redistribution.py",
        "tests/unit/test_redistribution.py",
        (
            "the-largest-that-is-enough-moves",
            "return min(enough, key=lambda entry: entry[1])[0]",
            "return max(enough, key=lambda entry: entry[1])[0]",
            "test_no_more_tokens_move_than_the_tolerance_requires",
        ),
        (
            "small-groups-are-placed-first",
            "key=lambda group: -costs[group])  # stable",
            "key=lambda group: costs[group])  # stable",
            "test_more_ranks_than_ids",
        ),
        (
            "the-first-holder-sends-everything",
            "root = min(sources, key=lambda worker: (sent.get(worker, 0), worker))",
            "root = min(sources)",
            "test_holders_share_the_sending",
        ),
        (
            "a-broadcast-counts-as-one-pair",
            "sent.get(root, 0) + len(missing) * len(targets)",
            "sent.get(root, 0) + len(missing)",
            "test_a_broadcast_to_two_workers_counts_twice",
        ),
        (
            "what-is-there-is-sent-again",
            "targets = tuple(worker for worker in workers if worker not in have)",
            "targets = tuple(workers)",
            "test_pairs_that_a_worker_already_has_are_not_sent",
        ),
    ),
    *_of(
        "asyncrl/dataflow/redistribution.py",
        "tests/unit/test_worker_groups.py",
        (
            "a-worker-of-another-group-is-asked",
            "able = [source for source in have if source in sources]",
            "able = list(have)",
            "test_each_pair_is_fetched_once_from_a_holder",
        ),
    ),
    *_of(
        "asyncrl/model/packing.py",
        "tests/unit/test_packing.py",
        (
            "a-sequence-that-fits-exactly-opens-another-part",
            "if lengths[i] <= room[at]:",
            "if lengths[i] < room[at]:",
            "test_the_budget_takes_precedence_over_balance",
        ),
        (
            "ranks-have-different-numbers-of-micro-batches",
            "count = max(len(fitted), min_count)",
            "count = len(fitted)",
            "test_every_rank_can_have_as_many_micro_batches_as_the_rank_with_most",
        ),
        (
            "parts-are-balanced-by-sequences",
            "loads[at] += costs[i]",
            "loads[at] += 1",
            "test_long_tails_are_balanced",
        ),
        (
            "one-long-sequence-ends-the-balance",
            "if not parts[at] or tokens[at] + lengths[i] <= max_tokens]",
            "if tokens[at] + lengths[i] <= max_tokens]",
            "test_a_sequence_longer_than_the_budget_gets_its_own_micro_batch",
        ),
        (
            "a-token-is-predicted-at-its-own-position",
            "to_device(predicted - 1),",
            "to_device(predicted),",
            "test_a_packed_row_by_hand",
        ),
        (
            "keys-of-groups-come-into-micro-batches",
            'spec.layout in ("token", "sequence")',
            "spec.layout",
            "test_keys_of_groups_are_dropped_even_if_each_group_has_one_sequence",
        ),
    ),
    *_of(
        "asyncrl/algorithms/advantages.py",
        "tests/unit/test_advantages.py",
        (
            "rewards-are-cut-from-above-only",
            ".clamp(-clip, clip)",
            ".clamp(max=clip)",
            "test_shape_rewards_by_hand",
        ),
        (
            "the-value-of-a-state-is-read-one-token-late",
            "values_T[(at_A - 1).clamp(min=0)]",
            "values_T[at_A]",
            "test_gae_by_hand",
        ),
        (
            "ended-sequences-are-bootstrapped",
            "last_value_A = torch.where(truncated_S[sequence_A], values_T[at_A], 0.0)",
            "last_value_A = values_T[at_A]",
            "test_gae_by_hand",
        ),
        (
            "advantages-leak-into-the-sequence-before",
            "torch.where(index_A + reach < end_A,",
            "torch.where(index_A + reach <= end_A,",
            "test_value_free_gives_every_token_the_final_reward",
        ),
        (
            "kl-is-rewarded",
            "rewards_T = -kl_coef * kl_T if",
            "rewards_T = kl_coef * kl_T if",
            "test_a_kl_penalty_in_the_reward_lowers_its_own_and_earlier_advantages",
        ),
        (
            "normalisation-counts-masked-tokens",
            "normalise_batch(advantages_T, mask_T, all_reduce_sum)",
            "normalise_batch(advantages_T, sampled_T, all_reduce_sum)",
            "test_untrained_tokens_do_not_enter_the_normalisation_over_tokens",
        ),
    ),
    *_of(
        "asyncrl/algorithms/ppo.py",
        "tests/unit/test_ppo.py",
        (
            "the-clip-takes-the-lower-loss",
            "loss_T = torch.max(unclipped_T, clipped_T)",
            "loss_T = torch.min(unclipped_T, clipped_T)",
            "test_clip_by_hand",
        ),
        (
            "the-sides-of-the-clip-are-swapped",
            "clipped_T = -advantages_T * ratio_T.clamp(1 - eps_low, 1 + eps_high)",
            "clipped_T = -advantages_T * ratio_T.clamp(1 - eps_high, 1 + eps_low)",
            "test_clip_by_hand",
        ),
        (
            "the-dual-clip-bounds-good-tokens-too",
            "bound_T = c_clip * advantages_T.abs()",
            "bound_T = -c_clip * advantages_T",
            "test_clip_by_hand",
        ),
        (
            "the-behaviour-weight-is-upside-down",
            "weight_T = token_ratios(anchor_logprobs_T, behav_logprobs_T, mask_T,",
            "weight_T = token_ratios(behav_logprobs_T, anchor_logprobs_T, mask_T,",
            "test_decoupled_by_hand",
        ),
        (
            "cispo-has-a-gradient-through-its-ratio",
            "    ratio_T = ratio_T.detach()\n    weight_T = ratio_T.clamp",
            "    weight_T = ratio_T.clamp",
            "test_the_gradient_on_policy_is_the_policy_gradient",
        ),
        (
            "a-sequence-is-as-long-as-its-prompt-and-response",
            "num_tokens_S = count_per_sequence(mask_T, cu_seqlens).clamp(min=1)",
            "num_tokens_S = cu_seqlens.diff().clamp(min=1)",
            "test_normalisations_by_hand",
        ),
        (
            "the-kl-that-stops-a-step-has-the-wrong-sign",
            "masked_sum(anchor_T - logprobs_T, mask_T)",
            "masked_sum(logprobs_T - anchor_T, mask_T)",
            "test_early_stop_by_the_statistics_of_the_loss",
        ),
    ),
    *_of(
        "asyncrl/algorithms/value.py",
        "tests/unit/test_value.py",
        (
            "the-value-clip-takes-the-lower-loss",
            "return torch.max(loss_T, clipped_T), decided_T",
            "return torch.min(loss_T, clipped_T), decided_T",
            "test_value_loss_by_hand",
        ),
        (
            "values-are-clipped-from-above-only",
            ".clamp(-eps_clip, eps_clip)",
            ".clamp(max=eps_clip)",
            "test_value_loss_is_symmetric",
        ),
        (
            "masked-states-are-learned-from",
            "values_T = torch.where(mask_T, values_T, zeros_T)\n    old_values_T",
            "old_values_T",
            "test_micro_batches_add_up_and_the_mask_keeps_nan_out",
        ),
        (
            "the-value-norm-starts-at-zero",
            "return self._mean / self._weight if self._weight else 0.0",
            "return self._mean",
            "test_value_norm_by_hand",
        ),
    ),
    *_of(
        "asyncrl/algorithms/kl.py",
        "tests/unit/test_kl.py",
        (
            "k3-of-the-inverse-ratio",
            "torch.exp((-d_T).clamp(max=MAX_LOG_RATIO)) - 1 + d_T",
            "torch.exp(d_T.clamp(max=MAX_LOG_RATIO)) - 1 - d_T",
            "test_estimates_by_hand",
        ),
        (
            "the-kl-coefficient-follows-a-broken-batch",
            "if not math.isfinite(kl):",
            "if math.isinf(kl):",
            "test_adaptive_by_hand",
        ),
    ),
    *_of(
        "asyncrl/weights/lineage.py",
        "tests/unit/test_lineage.py",
        (
            "the-checkpoint-step-is-counted-twice",
            "first = attempt.parent[1] + 1 if",
            "first = attempt.parent[1] if",
            "TestLineage::test_a_chain_of_attempts_is_one_lineage",
        ),
        (
            "without-a-snapshot-the-last-step-is-lost",
            "return self.events[: last + 1]",
            "return self.events[:last]",
            "TestAudit::test_a_checkpoint_without_a_snapshot_ends_with_its_step",
        ),
        (
            "a-group-at-its-bound-is-too-old",
            'if eta is not None and event["step"] - 1 - oldest > eta:',
            'if eta is not None and event["step"] - 1 - oldest >= eta:',
            "TestAudit::test_groups_beyond_the_bound_on_offpolicyness_are_found",
        ),
        (
            "a-group-is-as-old-as-its-newest-token",
            "oldest = min(first for",
            "oldest = max(first for",
            "TestAudit::test_a_group_is_as_old_as_its_oldest_token",
        ),
        (
            "a-group-stored-twice-is-fine",
            "if stored[attempt, ticket] != 1:",
            "if stored[attempt, ticket] < 1:",
            "TestAudit::test_each_problem_is_found",
        ),
        (
            "an-adopted-ticket-was-admitted-twice",
            'for event in admitted if event["event"] == "admitted")',
            "for event in admitted)",
            "TestAudit::test_the_admission_and_the_push_of_each_trained_group_are_checked",
        ),
    ),
    *_of(
        "asyncrl/manager/ledger.py",
        "tests/unit/test_ledger.py",
        (
            "a-turn-of-training-looks-like-lost-servers",
            "if server is None and self.servers.training:",
            "if server is None and not self.servers:",
            "test_in_trainings_turn_a_ticket_without_a_server_is_told_to_wait_and_its_pace_does_not_count",
        ),
        (
            "a-turn-of-training-makes-a-server-slow",
            "            live.has_moved = True  # the seconds of training's turn are not the server's\n",
            "",
            "test_in_trainings_turn_a_ticket_without_a_server_is_told_to_wait_and_its_pace_does_not_count",
        ),
    ),
    *_of(
        "asyncrl/launch/hosts/devices.py",
        "tests/unit/test_placement.py",
        (
            "devices-are-dealt-out-in-turn",
            "number * len(names) // self._count",
            "number % len(names)",
            "test_without_gpus_every_host_has_an_equal_share_of_the_devices",
        ),
        (
            "a-moved-device-shares-a-gpu-with-another-one",
            "free = [gpu for gpu in gpus if gpu not in taken]",
            "free = list(gpus)",
            "test_the_devices_of_a_lost_host_wait_for_it_if_no_other_has_room",
        ),
        (
            "devices-of-a-lost-host-keep-their-places",
            "            del self._places[number]\n",
            "            pass\n",
            "test_the_devices_of_a_lost_host_wait_for_it_if_no_other_has_room",
        ),
    ),
    *_of(
        "asyncrl/launch/hosts/placement.py",
        "tests/unit/test_placement.py",
        (
            "a-further-server-takes-the-gpu-of-a-device",
            "        taken |= self._devices.gpus_of(host.name)\n",
            "",
            "test_a_further_server_takes_no_gpu_that_is_a_device",
        ),
    ),
    *_of(
        "asyncrl/dataflow/layout_checks.py",
        "tests/unit/test_shared_devices.py",
        (
            "responses-that-may-not-be-interrupted-share-devices",
            'config.generation.interrupt not in ("abort", "retract"),',
            'config.generation.interrupt not in ("abort", "retract", "wait"),',
            "test_responses_that_may_not_be_interrupted_need_a_run_that_is_synchronous",
        ),
    ),
    *_of(
        "asyncrl/master/executor.py",
        "tests/unit/test_executor.py",
        (
            "groups-of-earlier-parts-are-computed-again",
            "made = self.mfc, step.made.get(self.mfc.name, frozenset())",
            "made = self.mfc, frozenset()",
            "test_targets_that_are_normalised_over_the_batch_are_made_once_from_all_of_its_parts",
        ),
    ),
    *_of(
        "asyncrl/dataflow/graph.py",
        "tests/unit/test_executor.py",
        (
            "models-train-on-parts-though-targets-need-the-batch",
            'if mfc.kind == "train_step" or mfc.interface == ADVANTAGES or not',
            "if mfc.interface == ADVANTAGES or not",
            "test_targets_that_are_normalised_over_the_batch_are_made_once_from_all_of_its_parts",
        ),
    ),
    *_of(
        "asyncrl/model/row_ranks.py",
        "tests/unit/test_packing.py",
        (
            "predictions-stay-in-the-order-of-the-ranks",
            'by_owner = np.argsort(owners, kind="stable")',
            "by_owner = np.arange(len(owners))",
            "test_each_prediction_is_made_by_the_rank_that_has_its_predictor",
        ),
    ),
    *_of(
        "asyncrl/model/experts.py",
        "tests/unit/test_split_experts.py",
        (
            "tokens-go-to-other-experts",
            "order = chosen.argsort(stable=True)",
            "order = chosen.argsort(stable=True, descending=True)",
            "test_each_token_goes_to_its_experts_and_comes_back",
        ),
        (
            "another-token-goes-to-the-expert",
            "hidden_TH[order // top_k]",
            "hidden_TH[order % len(hidden_TH)]",
            "test_each_token_goes_to_its_experts_and_comes_back",
        ),
        (
            "rows-of-several-ranks-count-as-those-of-one",
            "torch.arange(num_each, device=order.device).repeat(size)",
            "torch.arange(num_each, device=order.device).repeat_interleave(size)",
            "test_each_token_goes_to_its_experts_and_comes_back",
        ),
        (
            "results-stay-in-the-order-of-the-experts",
            "results = torch.empty_like(sorted_rows).index_copy(0, order, sorted_rows)",
            "results = sorted_rows",
            "test_each_token_goes_to_its_experts_and_comes_back",
        ),
        (
            "results-get-the-score-of-another-expert",
            "(results * scores_TK.reshape(-1, 1))",
            "(results * scores_TK.flip(1).reshape(-1, 1))",
            "test_each_token_goes_to_its_experts_and_comes_back",
        ),
    ),
]
