//! The list of all tests.

use crate::need::Listed;

/// Passes the list of all tests to another macro.
#[doc(hidden)]
#[macro_export]
macro_rules! __contract {
    ($then:path, $($with:tt)*) => {
        $then! { [$($with)*]
            exclusion [Kind(Mutex)] {
                free_lock_is_granted,
                held_lock_is_busy_for_other_clients,
                busy_reply_names_remaining_lease,
                busy_reply_changes_nothing,
                locks_of_different_keys_are_independent,
                released_lock_is_granted_again,
                storm_of_clients_never_shares_a_lock,
            }
            tokens [Kind(Mutex)] {
                tokens_grow_over_release,
                tokens_grow_over_expiry,
                tokens_grow_over_forced_release,
                tokens_of_blocks_do_not_overlap,
                tokens_grow_after_data_loss,
                tokens_grow_over_restart,
            }
            order [Kind(Mutex)] {
                unpolled_release_comes_before_later_acquire,
                steps_take_effect_in_the_order_of_calls,
                renewal_takes_effect_in_the_order_of_calls,
                verbs_can_be_called_outside_of_a_runtime,
            }
            release [Kind(Mutex)] {
                second_release_says_not_held,
                release_of_unknown_grant_says_not_held,
                release_of_foreign_grant_changes_nothing,
                release_of_expired_grant_leaves_next_holder_alone,
                release_undoes_acquire_dropped_at_any_poll,
                released_acquire_can_no_longer_take_effect,
            }
            min_hold [Kind(Mutex), MinHold] {
                released_lock_stays_taken_for_min_hold,
                min_hold_does_not_prolong_lease,
                nothing_prolongs_a_min_hold,
            }
            renewal [Kind(Mutex)] {
                renewal_extends_lease,
                renewal_of_unknown_grant_says_gone,
                renewal_of_released_grant_says_gone,
                renewal_of_foreign_grant_leaves_holder_alone,
                renewal_after_expiry_says_gone,
                renewals_are_answered_in_their_order,
            }
            expiry [Kind(Mutex)] {
                lease_runs_out,
                lease_lasts,
            }
            inspection [Kind(Mutex), Inspection] {
                inspection_names_the_holder,
                inspection_of_free_key_is_empty,
                list_has_held_locks_with_prefix,
                forced_release_ends_foreign_grant,
                forced_release_of_free_key_says_false,
            }
            notifications [Kind(Mutex), Notifications] {
                new_watch_says_look_now,
                release_wakes_watch,
                forced_release_wakes_watch,
                release_wakes_every_watch,
                long_names_that_begin_alike_have_watches_of_their_own,
                dropped_watch_leaves_others_alone,
                release_between_watch_and_look_is_not_missed,
            }
            kinds [] {
                key_of_another_kind_is_taken,
                plain_locks_of_one_key_exclude_each_other,
                each_kind_is_supported_or_refused,
            }
            read_write [Kind(Read), Kind(Write)] {
                readers_share,
                writer_is_alone,
                readers_keep_writer_out_until_the_last_leaves,
                writer_reads_under_its_own_lock,
                nested_reader_is_shown_and_forced_open_with_its_writer,
                reader_under_foreign_writer_is_kept_out,
                reader_under_lost_writer_is_kept_out_of_a_free_lock,
                each_reader_has_its_own_lease,
                read_write_tokens_grow,
                last_reader_wakes_writer,
            }
            prefer_writers [Kind(Read), Kind(Write), PreferWriters] {
                waiting_writer_keeps_new_readers_out,
                writer_that_gives_up_lets_readers_in,
            }
            fair [Kind(Fair)] {
                waiters_are_served_in_their_order,
                acquire_without_queue_position_overtakes_no_waiter,
                released_queue_position_is_given_up,
                silent_waiter_loses_its_position,
                returning_waiter_comes_before_later_ones,
                next_waiters_of_the_client_are_named,
                release_wakes_first_waiter,
            }
            permits [Kind(Permit)] {
                permits_are_granted_up_to_their_number,
                several_permits_are_granted_together_or_not_at_all,
                first_number_of_permits_stays,
                permits_return_with_release_and_expiry,
                more_permits_than_there_are_is_its_own_reply,
                waiter_for_many_permits_is_not_overtaken,
                release_of_permits_wakes_watch,
                total_that_an_acquire_sets_wakes_watch,
            }
            limits [Kind(Permit), Limits] {
                limit_is_judged_in_each_acquire_and_not_stored,
                limit_and_total_of_a_name_both_bind,
                deletion_without_a_total_ends_all_permits,
                release_below_a_limit_wakes_watch,
            }
            counters [Kind(Permit)] {
                permits_can_be_set_once_and_changed,
                repeated_counter_step_is_carried_out_once,
                drained_permits_are_gone,
            }
            unowned [Kind(Unowned)] {
                permits_without_owner_are_a_number,
                released_acquire_of_permits_without_owner_is_undone,
                released_acquire_adds_nothing_to_a_semaphore_made_anew,
                expired_permits_are_free_for_acquires_without_owner,
                total_that_an_acquire_sets_wakes_watch,
            }
            latches [Kind(Latch)] {
                latch_counts_down_to_zero,
                latch_is_set_once,
                repeated_count_down_counts_once,
                latch_wakes_waiters_at_zero,
            }
            sets [Kind(Mutex)] {
                set_is_granted_with_a_token_for_each_key,
                set_with_a_busy_key_grants_nothing,
            }
            random [] {
                random_steps_have_the_replies_of_memory,
            }
            names [Kind(Mutex)] {
                short_long_and_odd_names_are_locks,
                similar_names_are_different_locks,
                many_keys_are_held_at_once,
            }
            client [Kind(Mutex)] {
                waiting_client_gets_released_lock,
                downgrade_of_a_lost_write_lock_says_lost,
                held_lock_outlives_its_lease,
                shutdown_leaves_nothing,
                holder_learns_of_lost_data,
            }
            faults [Kind(Mutex)] {
                acquire_with_lost_reply_is_undone_by_release,
                unreachable_store_fails_in_bounded_time,
                frozen_store_fails_in_bounded_time,
                restarted_store_serves_again,
                tokens_grow_though_clock_goes_back,
            }
        }
    };
}

/// Creates a test for each promise of the contract, in modules by subject.
///
/// It takes an async function that creates a [`Fixture`](crate::Fixture); each test has its own fixture. The tests
/// need no runtime of the caller, and no dependency except this crate.
#[macro_export]
macro_rules! conform {
    ($factory:path) => {
        $crate::__contract! { $crate::__tests, $factory }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    ([$factory:path] $($group:ident $needs:tt { $($name:ident,)* })*) => {
        $(mod $group {
            #[allow(unused_imports)]
            use super::*;

            $(#[test]
            fn $name() {
                $crate::__test(
                    $factory(),
                    $crate::__needs!($needs),
                    |case| ::std::boxed::Box::pin($crate::checks::$group::$name(case)),
                );
            })*
        })*
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __needs {
    ([$($need:ident $(($kind:ident))?),*]) => {
        &[$($crate::Need::$need $(($crate::__Kind::$kind))?),*]
    };
}

macro_rules! list {
    ([] $($group:ident $needs:tt { $($name:ident,)* })*) => {
        vec![$($(Listed {
            group: stringify!($group),
            needs: $crate::__needs!($needs),
            name: stringify!($name),
            check: |case| Box::pin(crate::checks::$group::$name(case)),
        }),*),*]
    };
}

/// All tests, in the order of the contract.
pub(crate) fn all() -> Vec<Listed> {
    __contract! { list, }
}
