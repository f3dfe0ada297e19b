//! What servers say of themselves, round by round, and what was lost. Times are counted in rounds.

use super::*;

/// In the words of a server: `a 5` is the master of history a at 5, `a+` its replica, `a-` one that is not connected, `x`
/// is gone, `?` is mute. `b 6 a 5 1` has taken over from history a, of which it has all before 5, and has sent all its
/// data once.
fn role(words: &str) -> Role {
    let words: Vec<_> = words.split(' ').collect();
    let number = |at: usize| words.get(at).map_or(0, |word| word.parse::<i64>().unwrap());
    match words[0] {
        "x" => Role::Gone,
        "?" => Role::Mute,
        history => match history.strip_suffix(['+', '-']) {
            Some(of) => Role::Replica {
                history: of.to_owned(),
                follows: history.ends_with('+'),
                sent: 0,
            },
            None => Role::Master {
                history: history.to_owned(),
                upto: number(1),
                before: (words.get(2).unwrap_or(&"-").to_string(), number(3)),
                sent: number(4).unsigned_abs(),
            },
        },
    }
}

/// What was lost by the end, from when to when, in a story of rounds in which two servers speak.
fn lost(story: &[[&str; 2]]) -> Vec<(Nanos, Nanos)> {
    let mut group = Group::default();
    let mut lost = Vec::new();
    for (round, servers) in story.iter().enumerate() {
        let at = 10 * (round as Nanos + 1);
        let seen = |words: &&str| Seen {
            asked: at,
            heard: at + 5,
            role: role(words),
        };
        lost.extend(group.learn(servers.iter().map(seen).enumerate().collect()));
    }
    lost.extend(group.rest());
    lost.into_iter().map(|lost| (lost.from, lost.to)).collect()
}

#[test]
fn without_a_takeover_nothing_is_lost() {
    assert_eq!(
        lost(&[["a 1", "a+"], ["a 2", "a-"], ["?", "a+"], ["a 3", "a+"]]),
        []
    );
    // Killed, and there again with its data.
    assert_eq!(
        lost(&[["a 1", "a+"], ["x", "a-"], ["b 3", "a-"], ["b 4", "b+"]]),
        []
    );
}

#[test]
fn what_the_dead_one_was_asked_between_the_last_look_and_its_death_may_be_lost() {
    let story = [
        ["a 3", "a+"],
        ["a 4", "a+"],
        ["a 6", "a+"],
        ["x", "a-"],
        ["x", "a-"],
        ["x", "b 7 a 5"],
        ["b-", "b 8 a 5"],
        ["b+", "b 9 a 5 1"],
    ];
    // It was at 4 at 20 and at 6 at 30, of which the other has all before 5; and it was dead at 45.
    assert_eq!(lost(&story), [(20, 45)]);
}

#[test]
fn server_that_goes_on_as_a_replica_from_where_it_was_has_lost_nothing() {
    let story = |sent: &'static str| {
        [
            ["a 3", "a+"],
            ["a 4", "a+"],
            ["a 4", "b 5 a 5"],
            ["b-", "b 6 a 5"],
            ["b+", "b 6 a 5"],
            ["b+", sent],
        ]
    };
    assert_eq!(lost(&story("b 6 a 5 0")), []);
    // A server that was sent everything may have had more; the sender may have been asked before, and not answer.
    assert_eq!(lost(&story("b 6 a 5 1")), [(30, 45)]);
    assert_eq!(lost(&story("?")), [(30, 45)]);
}

#[test]
fn frozen_server_may_be_a_master_until_it_answers_again() {
    let story = [
        ["a 4", "a+"],
        ["?", "a-"],
        ["?", "b 5 a 5"],
        ["?", "b 6 a 5"],
        ["a 6", "b 7 a 5"],
        ["b-", "b 7 a 5"],
        ["b+", "b 7 a 5 1"],
    ];
    assert_eq!(lost(&story), [(10, 65)]);
    // And to the end when it is not heard.
    let lost = lost(&story[..4]);
    assert_eq!((lost.len(), lost[0].0), (1, 10));
    assert!(lost[0].1 > 45);
}

#[test]
fn server_that_comes_back_as_a_master_is_one_too_many() {
    let story = [
        ["a 4", "a+"],
        ["x", "a-"],
        ["x", "b 5 a 5"],
        ["c 4", "b 6 a 5"],
        ["c 5", "b 7 a 5"],
        ["b-", "b 7 a 5"],
        ["b+", "b 7 a 5 1"],
        ["b+", "b 8 a 5 1"],
    ];
    // Dead at 25; there again between 30 and 40, and seen as a replica at 65.
    let mut lost = lost(&story);
    lost.sort_unstable();
    assert_eq!(lost, [(10, 25), (30, 65)]);
}

#[test]
fn the_words_of_a_server_are_understood() {
    let master = "# Replication\r\nrole:master\r\nmaster_replid:abc\r\nmaster_replid2:def\r\nmaster_repl_offset:17\r\n\
                  second_repl_offset:9\r\nsync_full:2\r\n";
    assert_eq!(read(master), Some(role("abc 17 def 9 2")));
    let replica = "role:slave\r\nmaster_link_status:up\r\nmaster_replid:abc\r\nsync_full:0\r\n";
    assert_eq!(read(replica), Some(role("abc+")));
    assert_eq!(read("role:master\r\n"), None);
}
