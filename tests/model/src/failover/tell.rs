//! Steps and situations in words.

use stateright::Model;

use super::{Action, Failover, Hold, State, Task, Which, Who, Write, believers};

fn client(who: Who) -> &'static str {
    ["A", "B"][who]
}

fn task(who: Who, which: Which) -> String {
    format!("{}{}", client(who), which + 1)
}

fn hold(state: &State, who: Who, which: Which) -> Option<&Hold> {
    match &state.clients[who].tasks[which] {
        Task::Holding(hold) | Task::Answered(hold) => Some(hold),
        _ => None,
    }
}

pub(super) fn step(model: &Failover, before: &State, action: Action) -> Option<String> {
    let after = model.next_state(before, action)?;
    Some(match action {
        Action::Tick => return None,
        Action::Acquire(who, at_once) => {
            let which = before.clients[who].front()?;
            let hold = hold(&after, who, which)?;
            let more = match hold.reserved {
                0 => String::new(),
                _ => format!(" and {} for later", hold.token + 1),
            };
            let late = if at_once { "" } else { "; the answer is late" };
            format!(
                "{} gets the lock, token {}{more}{late}",
                task(who, which),
                hold.token
            )
        }
        Action::Write(who, which) => {
            format!(
                "{} sees that it holds, and writes; the write is late",
                task(who, which)
            )
        }
        Action::Land(Write { token, .. }) => {
            let fares = match after.resource == before.resource {
                true => "is refused",
                false => "is taken",
            };
            let last = before.resource.token;
            format!("the late write, token {token}, arrives after one with token {last} and {fares}")
        }
        Action::HandOff(who, which) => {
            let next = before.clients[who].front()?;
            let token = hold(&after, who, next)?.token;
            format!(
                "{} leaves and {} takes over, token {token}",
                task(who, which),
                task(who, next)
            )
        }
        Action::Leave(who, which) => format!("{} leaves", task(who, which)),
        Action::Renew(who, which, false) => format!("{} is renewed; the answer is late", task(who, which)),
        Action::Renew(who, which, true) => match hold(&after, who, which)?.deadline {
            0 => format!("{} is renewed and hears that its grant is gone", task(who, which)),
            _ => format!("{} is renewed", task(who, which)),
        },
        Action::Hear(who, which) => match before.clients[who].tasks[which] {
            Task::Answered(_) => format!("{} hears that it has got the lock", task(who, which)),
            _ => format!("{} hears of its renewal", task(who, which)),
        },
        Action::Replicate => "the replica has seen everything".to_owned(),
        Action::FailOver => "the replica takes over".to_owned(),
        Action::Flush => format!("the server loses all data, its clock at {}", after.now),
        Action::Connect(who) => format!("{} connects anew", client(who)),
    })
}

pub(super) fn situation(state: &State) -> String {
    let tokens: Vec<_> = believers(state)
        .map(|hold| format!("one holds with token {}", hold.token))
        .collect();
    let holders = match tokens.is_empty() {
        true => "nobody holds".to_owned(),
        false => tokens.join(", "),
    };
    format!(
        "{holders}; the last write has token {}; the highest token so far is {}",
        state.resource.token, state.highest
    )
}
