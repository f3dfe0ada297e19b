//! Steps and situations in words.

use stateright::Model;

use super::state::{Client, Packet, State, Task};
use super::{Action, Fate, Id, Rule, Single, Which, Who};

fn client(who: Who) -> &'static str {
    ["A", "B"][who]
}

fn task(who: Who, which: Which) -> String {
    format!("{}{}", client(who), which + 1)
}

/// Who waits for this acquire.
fn asker(state: &State, id: Id) -> String {
    match state.clients[id.who()].front() {
        Some(which) => task(id.who(), which),
        None => client(id.who()).to_owned(),
    }
}

/// Who has this grant.
fn holder(state: &State, id: Id) -> String {
    let is_it = |task: &Task| matches!(task, Task::Holding(hold) if hold.id == id);
    match state.clients[id.who()].tasks.iter().position(is_it) {
        Some(which) => task(id.who(), which),
        None => client(id.who()).to_owned(),
    }
}

/// What is new in what the server has.
fn outcome(before: &State, after: &State, id: Id) -> &'static str {
    match (before.store.holder, after.store.holder) {
        (None, Some(_)) => "it is granted",
        (Some(had), None) if had == id => "the key is free",
        (Some(_), None) => "the key is free, though somebody else had it",
        _ => "there is no such grant",
    }
}

fn release(before: &State, after: &State, id: Id, fate: Fate) -> String {
    match fate {
        Fate::InTime => outcome(before, after, id).to_owned(),
        Fate::Late => "the release is late".to_owned(),
        Fate::LateAnswer => format!("{}, the answer is late", outcome(before, after, id)),
    }
}

pub(super) fn step(model: &Single, before: &State, action: Action) -> Option<String> {
    let after = model.next_state(before, action)?;
    let token = after.store.last.wrapping_sub(1);
    let asks = |fate| match fate {
        Fate::InTime => format!("asks for the lock and gets it, token {token}"),
        Fate::Late => "asks for the lock; the request is late".to_owned(),
        Fate::LateAnswer => format!("asks for the lock; it is granted, token {token}, the answer is late"),
    };
    Some(match action {
        Action::Tick(None) => return None,
        Action::Tick(Some(who)) => format!("{}'s clock has missed a tick", client(who)),
        Action::Arrive(who, which) => format!("{} waits", task(who, which)),
        Action::Cancel(who, which) => format!("{} is given up", task(who, which)),
        Action::Ask(who, fate) => {
            let asker = model.who_asks(before, who)?;
            format!("{} {}", task(who, asker), asks(fate))
        }
        Action::AskFails(who, id, fate) => {
            let asker = asker(before, id);
            if !model.keeps(Rule::SentOnce) {
                format!("{asker} has no answer and {}", asks(fate))
            } else if model.keeps(Rule::UnknownIsUndone) {
                let release = release(before, &after, id, fate);
                format!(
                    "{asker} has no answer and {} releases the grant: {release}",
                    client(who)
                )
            } else {
                format!("{asker} has no answer and {} forgets about it", client(who))
            }
        }
        Action::Write(who, which) => format!(
            "{} sees that it holds, and writes; the write is late",
            task(who, which)
        ),
        Action::HandOff(who, which) => {
            let next = before.clients[who].front()?;
            let also = match model.keeps(Rule::HandedOnBeforeRelease) {
                true => "",
                false => ", while its release is on the way and frees the key",
            };
            format!(
                "{} leaves and {} takes over{also}",
                task(who, which),
                task(who, next)
            )
        }
        Action::Leave(who, which, fate) => {
            let Task::Holding(hold) = before.clients[who].tasks[which] else {
                return None;
            };
            format!(
                "{} leaves: {}",
                task(who, which),
                release(before, &after, hold.id, fate)
            )
        }
        Action::Renew(who, which, fate) => {
            let fares = match fate {
                Fate::InTime => "is renewed",
                Fate::Late => "is to be renewed; the request is late",
                Fate::LateAnswer => "is renewed, the answer is late",
            };
            format!("{}'s lease {fares}", task(who, which))
        }
        Action::RenewalFails(who, which) => format!("{}'s renewal was not answered", task(who, which)),
        Action::Notice(who, which) => format!("{} is told that its time is up", task(who, which)),
        Action::Again(who, id, fate) => {
            format!(
                "{} sends the release again: {}",
                client(who),
                release(before, &after, id, fate)
            )
        }
        Action::Land(message, _) => {
            let id = message.id;
            let who = client(id.who());
            match message.packet {
                Packet::Acquire(_) if after.store.holder == before.store.holder => {
                    format!("{who}'s late acquire arrives and is refused")
                }
                Packet::Acquire(_) => {
                    format!("{who}'s late acquire arrives: {}", outcome(before, &after, id))
                }
                Packet::Acquired(token) => {
                    format!("{} hears that it has the lock, token {token}", asker(before, id))
                }
                Packet::Refused => format!("{} hears that it was refused", asker(before, id)),
                Packet::Renew if after.store.holder == Some(id) => {
                    format!("{who}'s late renewal arrives: the server has its grant")
                }
                Packet::Renew => format!("{who}'s late renewal arrives: the grant is gone"),
                Packet::Renewed => format!("{} hears that its lease was renewed", holder(before, id)),
                Packet::Gone => format!("{} hears that its grant is gone", holder(before, id)),
                Packet::Release => format!("{who}'s late release arrives: {}", outcome(before, &after, id)),
                Packet::Released | Packet::NotHeld(_) => format!("{who} hears of its release"),
                Packet::Write(token) => {
                    let last = before.resource.token;
                    let fares = match token < last {
                        true if model.keeps(Rule::TokenIsChecked) => "is refused",
                        true => "is taken nevertheless",
                        false => "is taken",
                    };
                    format!(
                        "{who}'s late write, token {token}, arrives after one with token {last} and {fares}"
                    )
                }
            }
        }
        Action::Lose(message) => {
            let what = match message.packet {
                Packet::Acquire(_) => "acquire",
                Packet::Renew => "renewal",
                Packet::Release => "release",
                Packet::Write(_) => "write",
                _ => "answer",
            };
            format!("{}'s late {what} is lost", client(message.id.who()))
        }
        Action::Pause(who) => format!("{} is stopped meanwhile", client(who)),
        Action::Resume(who) => format!("{} goes on", client(who)),
        Action::Crash(who) => format!("{} dies", client(who)),
    })
}

pub(super) fn situation(model: &Single, state: &State) -> String {
    let holders = state.clients.iter().enumerate().flat_map(|(who, client)| {
        let holds = |task: &Task| matches!(task, Task::Holding(hold) if model.believes(hold));
        let tasks = client
            .tasks
            .iter()
            .enumerate()
            .filter(move |(_, task)| holds(task));
        tasks.map(move |(which, _)| task(who, which))
    });
    let holders: Vec<_> = holders.collect();
    let holders = match &holders[..] {
        [] => "nobody holds".to_owned(),
        [one] => format!("{one} holds"),
        all => format!("{} hold", all.join(" and ")),
    };
    let server = match state.store.holder {
        None => "nobody".to_owned(),
        Some(id) => holder(state, id),
    };
    let lost = |client: &Client| client.holds().any(|hold| hold.ended);
    let told = match state.clients.iter().any(lost) {
        true => ", somebody was told of a loss",
        false => "",
    };
    format!("{holders}{told}; the server has {server}")
}
