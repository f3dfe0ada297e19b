//! Histories that are right, and histories in which one thing is wrong. Times are in ms.

use super::*;
use crate::chaos::event::Life;

/// Two processes that lock key 0, each with a log; what the orchestrator says, and the register.
struct Story {
    first: &'static str,
    second: &'static str,
    orchestrator: &'static str,
    register: &'static str,
}

const QUIET: Story = Story {
    first: "",
    second: "",
    orchestrator: "",
    register: "",
};

/// Hold 1 of key 0, granted at 10 ms with token 100, and held until 50 ms.
const FIRST: &str = "0 hello 1\n1 ask 1 0 all 2000 wait\n10 got 1 100\n10 held 1\n50 held 1\n";
/// Hold 1 of key 0, granted at 60 ms with token 200, and held until 90 ms.
const SECOND: &str =
    "0 hello 1\n2 ask 1 0 all 2000 wait\n60 got 1 200\n60 held 1\n90 held 1\n91 let 1 drop\n";

/// The times of a log in ms as ns: they stand first, and where `fields` says.
fn in_nanos(text: &str) -> String {
    let nanos = |word: &str| format!("{word}000000");
    let line = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        let times = match words[1] {
            "lost" => vec![0, 3, 4],
            "told" | "deaf" => vec![0, 3],
            "loses" => vec![0, 2],
            "splits" => vec![0, 2, 3],
            _ => vec![0],
        };
        let word = |(at, word): (usize, &&str)| match times.contains(&at) {
            true => nanos(word),
            false => (*word).to_owned(),
        };
        words.iter().enumerate().map(word).collect::<Vec<_>>().join(" ") + "\n"
    };
    text.lines().map(line).collect()
}

fn history(story: &Story) -> History {
    let mut history = History::default();
    history.add_orchestrator(&in_nanos(story.orchestrator)).unwrap();
    history.add_register(&in_nanos(story.register)).unwrap();
    for (slot, log) in [story.first, story.second].into_iter().enumerate() {
        history
            .add_worker(Life { slot, life: 0 }, &in_nanos(log))
            .unwrap();
    }
    history
}

/// How many violations, late losses and unprotected ones there are.
fn found(story: &Story) -> [usize; 3] {
    let findings = check(&history(story));
    [
        findings.violations.len(),
        findings.late_losses.len(),
        findings.unprotected.len(),
    ]
}

#[test]
fn one_after_the_other_is_right() {
    let story = Story {
        first: format!("{FIRST}55 let 1 release\n56 gone 1 ok\n").leak(),
        second: SECOND,
        ..QUIET
    };
    assert_eq!(found(&story), [0, 0, 0]);
}

#[test]
fn check_that_answers_held_after_another_grant_is_a_violation() {
    let story = Story {
        first: format!("{FIRST}61 held 1\n").leak(),
        second: SECOND,
        ..QUIET
    };
    assert_eq!(found(&story), [1, 0, 0]);
}

#[test]
fn a_guard_that_was_dead_when_it_came_is_no_hold() {
    let first = format!("{FIRST}70 held 1\n").leak();
    let second = "0 hello 1\n2 ask 1 0 all 2000 wait\n60 got 1 90\n61 lost 1 0 60 Expired\n";
    let story = Story {
        first,
        second,
        ..QUIET
    };
    assert_eq!(found(&story), [0, 0, 0]);
}

#[test]
fn what_overlaps_after_the_data_were_lost_is_unprotected() {
    let first = format!("{FIRST}70 held 1\n").leak();
    let of = |orchestrator| Story {
        first,
        second: SECOND,
        orchestrator,
        ..QUIET
    };
    assert_eq!(found(&of("56 loses 55 *\n")), [0, 0, 1]);
    assert_eq!(found(&of("56 loses 55 0\n")), [0, 0, 1]);
    // Another key, before the one asked, after the other was granted.
    for elsewhere in ["56 loses 55 1\n", "0 loses 0 *\n", "62 loses 61 *\n"] {
        assert_eq!(found(&of(elsewhere)), [1, 0, 0], "{elsewhere}");
    }
}

#[test]
fn notice_after_another_grant_is_late() {
    let told = |told: &str| Story {
        first: format!("{FIRST}{told}").leak(),
        second: SECOND,
        ..QUIET
    };
    // Held at 55, granted to the other at 60, lost at 61.
    assert_eq!(found(&told("61 lost 1 55 61 Gone\n")), [0, 1, 0]);
    // Before.
    assert_eq!(found(&told("59 lost 1 55 58 Gone\n")), [0, 0, 0]);
    // It stood still.
    assert_eq!(found(&told("75 lost 1 55 75 Gone\n")), [0, 0, 0]);
    // It was asked after that, and believed; stood still or not.
    assert_eq!(found(&told("61 held 1\n85 lost 1 61 85 Gone\n")), [1, 1, 0]);
    assert_eq!(
        found(&told("61 held 1\n65 let 1 release\n66 gone 1 lost:Gone\n")),
        [1, 1, 0]
    );
    // Its release has found that it is gone, which is no wonder.
    assert_eq!(found(&told("55 let 1 release\n66 gone 1 lost:Gone\n")), [0, 0, 0]);
}

#[test]
fn a_signal_that_comes_too_late_is_late_where_the_process_ran() {
    let told = |threads: &str, told: &str| Story {
        first: format!("{FIRST}52 lost 1 50 52 Expired\n{told}")
            .replace("hello 1", threads)
            .leak(),
        second: SECOND,
        ..QUIET
    };
    assert_eq!(found(&told("hello 1", "70 told 1 6 Expired\n")), [0, 1, 0]);
    assert_eq!(found(&told("hello 1", "70 deaf 1 6\n")), [0, 1, 0]);
    assert_eq!(found(&told("hello 1", "58 told 1 6 Expired\n")), [0, 0, 0]);
    // It stood still in between, or may have.
    assert_eq!(found(&told("hello 1", "70 told 1 15 Expired\n")), [0, 0, 0]);
    assert_eq!(found(&told("hello 2", "70 told 1 6 Expired\n")), [0, 0, 0]);
}

#[test]
fn tokens_grow_from_hold_to_hold() {
    let with = |token: &str, asked: &str| Story {
        first: format!("{FIRST}55 let 1 drop\n").leak(),
        second: SECOND.replace(" 200\n", token).replace("2 ask", asked).leak(),
        ..QUIET
    };
    assert_eq!(found(&with(" 101\n", "2 ask")), [0, 0, 0]);
    // Asked for before the other was granted: the order of the holds counts.
    assert_eq!(found(&with(" 99\n", "2 ask")), [1, 0, 0]);
    // Asked for after that: the order of the requests counts too.
    assert_eq!(found(&with(" 99\n", "11 ask")), [2, 0, 0]);
    assert_eq!(found(&with(" 100\n", "2 ask")), [2, 0, 0]);
}

#[test]
fn lost_data_are_no_excuse_for_a_token_that_does_not_grow() {
    let story = Story {
        first: format!("{FIRST}55 let 1 drop\n").leak(),
        second: SECOND
            .replace(" 200\n", " 99\n")
            .replace("2 ask", "11 ask")
            .leak(),
        orchestrator: "56 loses 55 *\n",
        ..QUIET
    };
    assert_eq!(found(&story), [1, 0, 0]);
}

#[test]
fn the_register_takes_nothing_old_and_refuses_no_holder() {
    let of = |register| Story {
        first: format!("{FIRST}55 let 1 drop\n").leak(),
        second: SECOND,
        register,
        ..QUIET
    };
    let right = "20 took 0 100 p0.0.1\n70 took 0 200 p1.0.1\n71 refused 0 100 p0.0.1 200\n";
    assert_eq!(found(&of(right)), [0, 0, 0]);
    assert_eq!(
        found(&of("70 took 0 200 p1.0.1\n71 took 0 100 p0.0.1\n")),
        [1, 0, 0]
    );
    assert_eq!(found(&of("70 refused 0 200 p1.0.1 300\n")), [1, 0, 0]);
    // It did not hold it any more.
    assert_eq!(found(&of("95 refused 0 200 p1.0.1 300\n")), [0, 0, 0]);
}

#[test]
fn a_hold_that_contradicts_itself_is_a_violation() {
    for wrong in [
        "51 lost 1 50 51 Expired\n52 healed 1\n",
        "51 again 1 101\n",
        "51 lost 1 50 51 Expired\n52 let 1 release\n53 gone 1 ok\n",
    ] {
        let first = format!("{FIRST}{wrong}").leak();
        assert_eq!(found(&Story { first, ..QUIET }), [1, 0, 0], "{wrong}");
    }
    let first = format!("{FIRST}51 again 1 100\n52 let 1 release\n53 gone 1 ok\n").leak();
    assert_eq!(found(&Story { first, ..QUIET }), [0, 0, 0]);
}

#[test]
fn keys_have_nothing_to_do_with_each_other() {
    let story = Story {
        first: format!("{FIRST}80 held 1\n").leak(),
        second: SECOND
            .replace("ask 1 0", "ask 1 1")
            .replace(" 200\n", " 50\n")
            .leak(),
        ..QUIET
    };
    assert_eq!(found(&story), [0, 0, 0]);
}

#[test]
fn successor_on_a_lost_grant_is_unprotected_too() {
    // Hold 2 asks after the data were lost, and has the next token of the grant that hold 1 had before.
    let heir = "55 let 1 drop\n54 ask 2 0 all 2000 wait\n56 got 2 TOKEN\n56 held 2\n70 held 2\n";
    let with = |token: &str| Story {
        first: format!("{FIRST}{}", heir.replace("TOKEN", token)).leak(),
        second: SECOND,
        orchestrator: "53 loses 52 *\n",
        ..QUIET
    };
    assert_eq!(found(&with("101")), [0, 0, 1]);
    // One of its own has no excuse.
    assert_eq!(
        found(&Story {
            second: SECOND.replace(" 200\n", " 900\n").leak(),
            ..with("800")
        }),
        [1, 0, 0]
    );
}

#[test]
fn successor_after_another_grant_is_unprotected_as_well() {
    // The lost grant is handed off at 65, after the other one was granted at 60.
    let heir = "54 ask 2 0 all 2000 wait\n64 let 1 drop\n65 got 2 101\n65 held 2\n70 held 2\n";
    let of = |orchestrator| Story {
        first: format!("{}{heir}", FIRST.replace("50 held", "51 held")).leak(),
        second: SECOND,
        orchestrator,
        ..QUIET
    };
    assert_eq!(found(&of("53 loses 52 *\n")), [0, 0, 1]);
    for elsewhere in ["53 loses 52 1\n", "0 loses 0 *\n"] {
        assert_eq!(found(&of(elsewhere)), [1, 0, 0], "{elsewhere}");
    }
}

#[test]
fn a_fail_over_excuses_nothing_but_what_was_asked_before_the_old_master_ended() {
    let story = |orchestrator: &'static str, held: &str| Story {
        first: format!("{FIRST}{held} held 1\n").leak(),
        second: SECOND,
        orchestrator,
        ..QUIET
    };
    // The first was asked for at 1, the other one granted at 60.
    assert_eq!(found(&story("59 splits 40 50 0 -\n", "80")), [0, 0, 1]);
    for elsewhere in [
        "59 splits 0 0 0 -\n",
        "99 splits 70 80 0 -\n",
        "59 splits 40 50 1 -\n",
    ] {
        assert_eq!(found(&story(elsewhere, "80")), [1, 0, 0], "{elsewhere}");
    }
}

#[test]
fn belief_in_a_lost_grant_for_longer_than_any_lease_has_no_excuse() {
    let story = |orchestrator: &'static str, held: &str| Story {
        first: format!("{FIRST}{held} held 1\n").leak(),
        second: "0 hello 1\n2 ask 1 0 all 2000 wait\n60 got 1 200\n60 held 1\n9000 held 1\n9001 let 1 drop\n",
        orchestrator,
        ..QUIET
    };
    for lost in ["59 splits 40 50 0 -\n", "50 loses 40 *\n"] {
        assert_eq!(found(&story(lost, "3050")), [0, 0, 1], "{lost}");
        assert_eq!(found(&story(lost, "3051")), [1, 0, 0], "{lost}");
    }
}

#[test]
fn a_fail_over_is_no_excuse_for_a_token_that_does_not_grow() {
    let story = Story {
        first: format!("{FIRST}55 let 1 drop\n").leak(),
        second: SECOND
            .replace(" 200\n", " 99\n")
            .replace("2 ask", "11 ask")
            .leak(),
        orchestrator: "59 splits 10 58 0 -\n",
        ..QUIET
    };
    assert_eq!(found(&story), [1, 0, 0]);
}

#[test]
fn of_two_masters_the_second_grant_may_be_the_one_that_is_lost() {
    let story = |orchestrator: &'static str, held: &str| Story {
        first: "0 hello 1\n1 ask 1 0 all 2000 wait\n10 got 1 100\n10 held 1\n9000 held 1\n9001 let 1 drop\n",
        second: SECOND
            .replace("90 held", held)
            .replace("91 let", "9000 let")
            .leak(),
        orchestrator,
        ..QUIET
    };
    // It was asked for at 2 and granted at 60.
    assert_eq!(found(&story("70 splits 5 65 0 -\n", "90 held")), [0, 0, 1]);
    assert_eq!(found(&story("70 splits 5 65 0 -\n", "3066 held")), [1, 0, 0]);
    assert_eq!(found(&story("70 splits 61 65 0 -\n", "90 held")), [1, 0, 0]);
    // One store that lost its data has lost the first.
    assert_eq!(found(&story("65 loses 5 *\n", "90 held")), [1, 0, 0]);
}

#[test]
fn lost_grant_may_be_handed_to_a_late_waiter_by_a_holder_that_did_not_wait() {
    let heir = "53 ask 2 0 all 2000 wait\n56 quit 2\n61 ask 3 0 all 2000 wait\n63 got 3 150\n63 held 3\n64 held 3\n65 let 3 drop\n";
    let with = |heir: &str, orchestrator: &'static str| Story {
        first: heir.to_owned().leak(),
        second: "0 hello 1\n54 ask 1 0 all 2000 wait\n60 got 1 200\n60 held 1\n61 held 1\n62 let 1 drop\n",
        orchestrator,
        ..QUIET
    };
    let splits = "59 splits 50 58 0 -\n";
    // Once in the order of requests; that of the holds is excused in any case.
    assert_eq!(found(&with(heir, splits)), [0, 0, 1]);
    // A holder that asked after the other grant cannot have left the lock.
    let late = heir.replace("53 ask 2", "61 ask 2").replace("56 quit", "62 quit");
    assert_eq!(found(&with(&late, splits))[0], 1);
    assert!(found(&with(heir, ""))[0] > 0);
    assert!(found(&with(heir, "99 splits 70 80 0 -\n"))[0] > 0);
}

#[test]
fn readers_share_a_key_and_writers_do_not() {
    let of = |first: &str, second: &str| Story {
        first: format!("{FIRST}80 held 1\n").replace("0 all", first).leak(),
        second: SECOND.replace("0 all", second).leak(),
        ..QUIET
    };
    assert_eq!(found(&of("0 read", "0 read")), [0, 0, 0]);
    for (first, second) in [("0 read", "0 all"), ("0 all", "0 read"), ("0 all", "0 all")] {
        assert_eq!(found(&of(first, second)), [1, 0, 0], "{first} and {second}");
    }
}

#[test]
fn readers_learn_of_their_grants_in_any_order() {
    // Both were asked for before either was granted.
    let of = |share: &str| Story {
        first: format!("{FIRST}55 let 1 drop\n")
            .replace("0 all", share)
            .replace(" 100\n", " 300\n")
            .leak(),
        second: SECOND.replace("0 all", share).leak(),
        ..QUIET
    };
    assert_eq!(found(&of("0 all")), [1, 0, 0]);
    for share in ["0 read", "0 1/3"] {
        assert_eq!(found(&of(share)), [0, 0, 0], "{share}");
    }
}

#[test]
fn more_permits_than_there_are_is_a_violation() {
    let of = |first: &str, second: &str, orchestrator| Story {
        first: format!("{FIRST}80 held 1\n").replace("0 all", first).leak(),
        second: SECOND.replace("0 all", second).leak(),
        orchestrator,
        ..QUIET
    };
    assert_eq!(found(&of("0 1/3", "0 2/3", "")), [0, 0, 0]);
    assert_eq!(found(&of("0 2/3", "0 2/3", "")), [1, 0, 0]);
    // The store may have forgotten the first, or not yet.
    assert_eq!(found(&of("0 2/3", "0 2/3", "56 loses 55 0\n")), [0, 0, 1]);
    assert_eq!(found(&of("0 2/3", "0 2/3", "62 loses 61 0\n")), [1, 0, 0]);
}

#[test]
fn permits_that_the_store_knew_are_counted_though_it_had_forgotten_others() {
    // It forgets hold 1 at 55, and then grants hold 2 at 57 and the other process's hold at 60.
    let of = |third: &str| Story {
        first: format!(
            "{}80 held 1\n56 ask 2 0 2/3 2000 wait\n57 got 2 700\n57 held 2\n80 held 2\n",
            FIRST.replace("0 all", "0 2/3")
        )
        .leak(),
        second: SECOND
            .replace("2 ask 1 0 all", &format!("57 ask 1 0 {third}"))
            .leak(),
        orchestrator: "55 loses 54 0\n",
        ..QUIET
    };
    assert_eq!(found(&of("1/3")), [0, 0, 2]);
    assert_eq!(found(&of("2/3")), [1, 0, 1]);
}

#[test]
fn a_loss_is_late_only_where_the_share_was_given_to_another() {
    // Held at 55, granted to the other at 60, lost at 61.
    let of = |first: &str, second: &str| Story {
        first: format!("{FIRST}61 lost 1 55 61 Gone\n")
            .replace("0 all", first)
            .leak(),
        second: SECOND.replace("0 all", second).leak(),
        ..QUIET
    };
    assert_eq!(found(&of("0 read", "0 read")), [0, 0, 0]);
    assert_eq!(found(&of("0 read", "0 all")), [0, 1, 0]);
    assert_eq!(found(&of("0 1/3", "0 2/3")), [0, 0, 0]);
    assert_eq!(found(&of("0 2/3", "0 2/3")), [0, 1, 0]);
}

#[test]
fn readers_side_by_side_excuse_nothing_for_each_other() {
    // Hold 2 was asked for after the data were lost; hold 1 before, with a token near its own.
    let of = |share: &str| Story {
        first: format!(
            "{}55 let 1 drop\n54 ask 2 0 {share} 2000 wait\n56 got 2 101\n56 held 2\n70 held 2\n",
            FIRST.replace("0 all", &format!("0 {share}"))
        )
        .leak(),
        second: SECOND,
        orchestrator: "53 loses 52 *\n",
        ..QUIET
    };
    assert_eq!(found(&of("all")), [0, 0, 1]);
    assert_eq!(found(&of("read")), [1, 0, 0]);
}
