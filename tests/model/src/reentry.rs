//! One client that enters the lock twice, one inside the other, and one that wants it too; requests that are sent
//! again when they are not answered.
//!
//! Here holds are counted in the process: the server knows one grant, and its release may be repeated for ever. Where
//! the server counts (as Redisson's does), a request that is carried out twice counts twice.

use smallvec::SmallVec;
use stateright::{Model, Property};

use crate::check::{self, Told};

/// A rule of the protocol that can be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Re-entry is counted in the process, not in the store; a release that is carried out twice does no more than one.
    ReleasesCountOnce,
    /// The same, and an acquire is sent once: the next attempt asks for another grant.
    AcquiresAreSentOnce,
}

impl check::Rule for Rule {
    type World = Reentry;
    const MODEL: &'static str = "reentry";
    const ALL: &'static [Rule] = &[Rule::ReleasesCountOnce, Rule::AcquiresAreSentOnce];

    fn worlds() -> Vec<(&'static str, Reentry)> {
        vec![(
            "holds inside holds",
            Reentry {
                without: None,
                again: 4,
            },
        )]
    }

    fn prevents(self) -> &'static str {
        match self {
            Rule::ReleasesCountOnce => ONE_HOLDER,
            Rule::AcquiresAreSentOnce => ENDS_FREE,
        }
    }

    fn taken_out(self) -> Reentry {
        Reentry {
            without: Some(self),
            again: 1,
        }
    }
}

/// Two never hold the lock at the same time.
pub const ONE_HOLDER: &str = "two never hold";
/// When nothing can happen any more, the key is free.
pub const ENDS_FREE: &str = "in the end it is free";

/// The model.
#[derive(Debug, Clone)]
pub struct Reentry {
    /// The rule that does not hold.
    pub without: Option<Rule>,
    /// How many requests are sent once more than they had to be, while the first one is under way.
    pub again: u8,
}

/// A client, by its place.
pub type Who = usize;

/// How often each client enters the lock before it leaves it.
const LEVELS: [u8; 2] = [2, 1];

/// What is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Request {
    /// One hold more.
    Enter,
    /// One hold less.
    Leave,
}

/// A request under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The client.
    pub who: Who,
    /// Which of its steps.
    pub step: u8,
    /// What it asks for.
    pub request: Request,
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// Who has the key, and how often the server has counted.
    pub holder: Option<(Who, u8)>,
    /// Those who want the lock.
    pub clients: [Client; 2],
    /// What is under way; one of these overtakes another.
    pub net: SmallVec<[Message; 4]>,
    /// How many may still be sent again.
    pub again: u8,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Client {
    /// How many of its steps are done: first it enters, then it leaves as often.
    pub steps: u8,
    /// The request for the next one is not answered yet.
    pub asking: bool,
}

/// A step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A client takes the next of its steps, by a request or without one.
    Next(Who),
    /// It has no answer and sends the request again.
    Again(Who),
    /// A request arrives and is answered.
    Land(Message),
}

impl Reentry {
    fn counts_in_process(&self) -> bool {
        self.without.is_none()
    }

    /// An acquire is sent once. Where the server counts, one of the two kinds is sent again at a time, to see what comes
    /// of which.
    fn may_send_again(&self, request: Request) -> bool {
        match self.without {
            None | Some(Rule::ReleasesCountOnce) => request == Request::Leave,
            Some(Rule::AcquiresAreSentOnce) => request == Request::Enter,
        }
    }

    /// The next step of a client, and whether the server has to know of it.
    fn next(&self, state: &State, who: Who) -> Option<(Message, bool)> {
        let (step, levels) = (state.clients[who].steps, LEVELS[who]);
        let request = match step {
            _ if step < levels => Request::Enter,
            _ if step < 2 * levels => Request::Leave,
            _ => return None,
        };
        let is_outermost = step == 0 || step + 1 == 2 * levels;
        let message = Message { who, step, request };
        Some((message, is_outermost || !self.counts_in_process()))
    }
}

impl State {
    /// How many levels deep a client is inside.
    fn inside(&self, who: Who) -> u8 {
        let steps = self.clients[who].steps;
        steps.min(2 * LEVELS[who] - steps)
    }

    fn holders(&self) -> usize {
        (0..2).filter(|who| self.inside(*who) > 0).count()
    }

    /// What the server does; whether it is done, and not refused.
    fn carry_out(&mut self, Message { who, request, .. }: Message, counts: bool) -> bool {
        match (request, self.holder) {
            (Request::Enter, None) => self.holder = Some((who, 1)),
            (Request::Enter, Some((holder, count))) if holder == who => {
                self.holder = Some((who, if counts { count + 1 } else { 1 }));
            }
            (Request::Enter, Some(_)) => return false,
            (Request::Leave, Some((holder, count))) if holder == who => {
                self.holder = (count > 1).then(|| (who, count - 1));
            }
            // Not held: it was released before.
            (Request::Leave, _) => {}
        }
        true
    }
}

impl Model for Reentry {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client {
            steps: 0,
            asking: false,
        };
        vec![State {
            holder: None,
            clients: [client; 2],
            net: SmallVec::new(),
            again: self.again,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for who in 0..2 {
            match (state.clients[who].asking, self.next(state, who)) {
                (false, Some(_)) => actions.push(Action::Next(who)),
                (true, Some((message, _))) if state.again > 0 && self.may_send_again(message.request) => {
                    actions.push(Action::Again(who));
                }
                _ => {}
            }
        }
        let mut net = state.net.clone();
        net.dedup();
        actions.extend(net.into_iter().map(Action::Land));
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Next(who) => match self.next(state, who)? {
                (message, true) => {
                    next.clients[who].asking = true;
                    next.net.push(message);
                }
                (_, false) => next.clients[who].steps += 1,
            },
            Action::Again(who) => {
                next.again -= 1;
                next.net.push(self.next(state, who)?.0);
            }
            Action::Land(message) => {
                let at = next.net.iter().position(|other| *other == message)?;
                next.net.remove(at);
                let done = next.carry_out(message, !self.counts_in_process());
                let client = &mut next.clients[message.who];
                // Somebody still waits for this answer.
                if client.asking && client.steps == message.step {
                    client.asking = false;
                    client.steps += u8::from(done);
                }
            }
        }
        next.net.sort_unstable();
        (next != *state).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(ONE_HOLDER, |_, state: &State| state.holders() <= 1),
            Property::always(ENDS_FREE, |model: &Reentry, state: &State| {
                let all_done = (0..2).all(|who| model.next(state, who).is_none());
                !(all_done && state.net.is_empty()) || state.holder.is_none()
            }),
            Property::sometimes(
                "a request is carried out after its answer was heard",
                |_, state: &State| {
                    let late = |message: &Message| message.step < state.clients[message.who].steps;
                    state.net.iter().any(late)
                },
            ),
        ]
    }
}

impl Told for Reentry {
    fn step(&self, before: &State, action: &Action) -> Option<String> {
        let client = |who: Who| ["A", "B"][who];
        let what = |message: &Message| match (message.request, message.step, LEVELS[message.who]) {
            (_, _, 1) => format!("{:?}", message.request).to_lowercase(),
            (Request::Enter, 0, _) => "enter".to_owned(),
            (Request::Enter, ..) => "enter once more".to_owned(),
            (Request::Leave, 2, _) => "leave the inner hold".to_owned(),
            (Request::Leave, ..) => "leave".to_owned(),
        };
        Some(match action {
            Action::Next(who) => {
                let (message, asks) = self.next(before, *who)?;
                let how = if asks {
                    "asks to"
                } else {
                    "does without a request:"
                };
                format!("{} {how} {}", client(*who), what(&message))
            }
            Action::Again(who) => {
                let (message, _) = self.next(before, *who)?;
                format!(
                    "{} has no answer and asks again to {}",
                    client(*who),
                    what(&message)
                )
            }
            Action::Land(message) => {
                let after = self.next_state(before, *action)?;
                let now = match after.holder {
                    None => "free".to_owned(),
                    Some((who, count)) => format!("{}'s, count {count}", client(who)),
                };
                let again = match message.step < before.clients[message.who].steps {
                    true => "the late copy of ",
                    false => "",
                };
                format!(
                    "{again}{}'s request to {} arrives: the key is {now}",
                    client(message.who),
                    what(message)
                )
            }
        })
    }

    fn situation(&self, state: &State) -> String {
        let names = ["A", "B"];
        let inside: Vec<_> = (0..2)
            .filter(|who| state.inside(*who) > 0)
            .map(|who| names[who])
            .collect();
        let holders = match &inside[..] {
            [] => "nobody holds".to_owned(),
            [one] => format!("{one} holds"),
            all => format!("{} hold", all.join(" and ")),
        };
        let server = state.holder.map_or("nobody", |(who, _)| names[who]);
        format!("{holders}; the server has {server}")
    }

    fn is_tick(&self, _: &Action) -> bool {
        false
    }
}
