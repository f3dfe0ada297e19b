//! Steps and situations in words.

use stateright::Model;

use super::{Action, Phase, Quorum, State, Token, Where, Who, believers};

fn client(who: Who) -> &'static str {
    ["A", "B"][who]
}

fn has(model: &Quorum, state: &State, who: Who) -> String {
    match state.clients[who].phase {
        Phase::Holding { token, .. } => format!(": {} has the lock{}", client(who), with(model, token)),
        Phase::Raising { token, .. } => format!(": {} has a majority{}", client(who), with(model, token)),
        _ => String::new(),
    }
}

fn with(model: &Quorum, token: Token) -> String {
    match model.tokens {
        true => format!(", token {token}"),
        false => String::new(),
    }
}

pub(super) fn step(model: &Quorum, before: &State, action: Action) -> Option<String> {
    let after = model.next_state(before, action)?;
    // Members are told by numbers from 1 on.
    let m = |at: Where| at + 1;
    Some(match action {
        Action::Tick => return None,
        Action::Ask(who) => format!("{} asks for the lock", client(who)),
        Action::Vote(who, at) => {
            let granted = before.members[at].holder != after.members[at].holder;
            let abstains = before.members[at].holder.is_none() && !granted;
            let token = after.members[at].last;
            let says = match (granted, abstains) {
                (true, _) => format!("grants it to {}{}", client(who), with(model, token)),
                (_, true) => format!("does not vote for {} yet", client(who)),
                _ => format!("refuses {}, since another has it", client(who)),
            };
            let first = matches!(before.clients[who].phase, Phase::Asking { .. });
            let has = if first {
                has(model, &after, who)
            } else {
                String::new()
            };
            format!("member {} {says}{has}", m(at))
        }
        Action::Raise(who, at) => {
            let Phase::Raising { token, .. } = before.clients[who].phase else {
                return None;
            };
            let has = match after.clients[who].phase {
                Phase::Holding { .. } => format!(": {} has the lock", client(who)),
                Phase::Idle => format!(": {} gives up, since the grant is gone there", client(who)),
                _ => String::new(),
            };
            match model.tokens {
                true => format!("member {} is told token {token}{has}", m(at)),
                false => format!("member {} confirms {}'s grant{has}", m(at), client(who)),
            }
        }
        Action::Late(who, at) => {
            format!(
                "an acquire that {} has given up arrives at member {}",
                client(who),
                m(at)
            )
        }
        Action::RenewalFails(who) => format!("{}'s renewal was not answered", client(who)),
        Action::GiveUp(who) => format!("{} gives up", client(who)),
        Action::Renew(who) => format!("{} asks for a renewal", client(who)),
        Action::RenewAt(who, at) => match before.members[at].holder {
            Some(grant) if grant.client == who => format!("member {} renews {}", m(at), client(who)),
            _ => format!("member {} does not know {}'s grant", m(at), client(who)),
        },
        Action::Leave(who) => format!("{} leaves", client(who)),
        Action::Free(at) => {
            let grant = before.members[at].holder?;
            format!("{}'s release arrives at member {}", client(grant.client), m(at))
        }
        Action::Restart(at) => format!("member {} is restarted without its data", m(at)),
        Action::Crash(who) => format!("{} dies", client(who)),
    })
}

pub(super) fn situation(state: &State) -> String {
    let holders: Vec<_> = believers(state).map(client).collect();
    let holders = match &holders[..] {
        [] => "nobody holds".to_owned(),
        [one] => format!("{one} holds"),
        all => format!("{} hold", all.join(" and ")),
    };
    let members = state.members.iter().enumerate().map(|(at, member)| {
        let whose = member.holder.map_or("free", |grant| client(grant.client));
        format!("{}: {whose}", at + 1)
    });
    let members: Vec<_> = members.collect();
    let back = match state.went_back {
        true => format!("; the highest token before was {}", state.highest),
        false => String::new(),
    };
    format!("{holders} ({}){back}", members.join(", "))
}
