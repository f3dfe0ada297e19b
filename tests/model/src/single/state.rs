//! What a state of the model consists of. All times are counted from now on, in ticks, so that the same
//! situation at another time is the same state.

use smallvec::SmallVec;

use super::Faults;

/// A client, by its place.
pub type Who = usize;
/// A task of a client, by its place.
pub type Which = usize;

/// What the store knows a grant by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Id {
    /// The client.
    pub client: u8,
    /// The lowest number that nothing refers to any more: as good as one that was never used.
    pub number: u8,
}

impl Id {
    /// The client whose grant it is.
    pub fn who(self) -> Who {
        usize::from(self.client)
    }
}

/// All there is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    /// The server.
    pub store: Store,
    /// Those who want the lock.
    pub clients: [Client; 2],
    /// What is under way and late. What is in time is not seen: it is sent, carried out and answered in one step.
    pub net: SmallVec<[Message; 3]>,
    /// What the lock protects.
    pub resource: Resource,
    /// What may still go wrong.
    pub left: Faults,
}

/// The key at the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Store {
    /// Who has it.
    pub holder: Option<Id>,
    /// What is left of its lease.
    pub lease: u8,
    /// The last fencing token that was given.
    pub last: u8,
    /// For how long nobody has been behind the grant, or since its last renewal landed if that is later.
    pub orphaned: u8,
}

/// A resource that is told the fencing token with each write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Resource {
    /// The token of the last write.
    pub token: u8,
    /// A write was taken that is older than the one before.
    pub went_back: bool,
}

/// Whether a process acts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// It does.
    Up,
    /// It is stopped for a while: its clock runs on, what comes for it waits.
    Paused,
    /// It is gone.
    Down,
}

/// A process with two tasks that want the lock once each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Client {
    /// Whether it acts.
    pub mode: Mode,
    /// Served in their order.
    pub tasks: [Task; 2],
    /// Acquires that are not answered yet.
    pub attempts: SmallVec<[Attempt; 2]>,
    /// Grants that are being given back.
    pub releases: SmallVec<[Release; 2]>,
}

/// One who wants the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Task {
    /// Has not come yet.
    Fresh,
    /// Stands in line.
    Waiting,
    /// Is inside.
    Holding(Hold),
    /// Is through, has gone away or is dead.
    Done,
}

/// A grant as its holder has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hold {
    /// The grant.
    pub id: Id,
    /// Its fencing token.
    pub token: u8,
    /// When it is lost, by the holder's clock; 0 when it is.
    pub deadline: u8,
    /// The holder was told that it is lost.
    pub ended: bool,
    /// When it is to be renewed.
    pub due: u8,
    /// How long ago the renewal was sent that is not answered yet.
    pub renewal: Option<u8>,
    /// The last renewal failed.
    pub suspect: bool,
    /// Tokens that are left for those to whom it is handed off.
    pub reserved: u8,
    /// It was handed off, and no tick has passed since but the one that ended it.
    pub fresh: bool,
}

/// An acquire that was sent and not answered yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt {
    /// The grant it asks for.
    pub id: Id,
    /// How long ago it was sent, by the client's clock.
    pub age: u8,
    /// For how long the server may yet carry it out, by the server's clock; 0 for no more.
    pub open: u8,
    /// Who asked has gone, or has got the lock from another task.
    pub abandoned: bool,
}

/// A grant that is being given back, or an acquire of unknown outcome that is being undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Release {
    /// The grant.
    pub id: Id,
    /// For how long the acquire may yet be carried out: until then "not held" says nothing.
    pub open: u8,
    /// How long ago the copy was sent that is not answered yet.
    pub asked: Option<u8>,
}

/// Something under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// The grant it is about.
    pub id: Id,
    /// What it says.
    pub packet: Packet,
    /// Whether its sender still listens for the answer.
    pub heard: bool,
}

/// What a message says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Packet {
    /// The lock, please; within so many ticks, 0 for too late.
    Acquire(u8),
    /// It is yours, with this token.
    Acquired(u8),
    /// Somebody has it, or the acquire came too late.
    Refused,
    /// Prolong the lease.
    Renew,
    /// It runs anew.
    Renewed,
    /// There is no such grant.
    Gone,
    /// The lock is given back.
    Release,
    /// It was, and is free.
    Released,
    /// There was no such grant; whether that is final.
    NotHeld(bool),
    /// A write to the resource, with the holder's token.
    Write(u8),
}

impl Packet {
    /// Whether it goes to a client.
    pub fn is_answer(self) -> bool {
        use Packet::{Acquired, Gone, NotHeld, Refused, Released, Renewed};
        matches!(
            self,
            Acquired(_) | Refused | Renewed | Gone | Released | NotHeld(_)
        )
    }
}

impl State {
    /// The holds of a client.
    pub fn holds(&self, who: Who) -> impl Iterator<Item = &Hold> {
        self.clients[who].holds()
    }

    /// Whether a write of this holder is under way.
    pub fn is_written_by(&self, hold: &Hold) -> bool {
        let theirs = |message: &Message| message.id == hold.id && message.packet == Packet::Write(hold.token);
        self.net.iter().any(theirs)
    }

    /// A grant number that nothing refers to.
    pub fn unused(&self, who: Who) -> Id {
        let client = who as u8;
        let is_used = |id: Id| {
            let client = &self.clients[who];
            self.store.holder == Some(id)
                || client.holds().any(|hold| hold.id == id)
                || client.attempts.iter().any(|attempt| attempt.id == id)
                || client.releases.iter().any(|release| release.id == id)
                || self.net.iter().any(|message| message.id == id)
        };
        let mut id = Id { client, number: 0 };
        while is_used(id) {
            id.number += 1;
        }
        id
    }
}

impl State {
    /// Only the order of tokens says anything: the least of them becomes 0.
    pub fn tokens_from_zero(&mut self) {
        let (store, resource) = (&mut self.store.last, &mut self.resource.token);
        let holds = self.clients.iter_mut().flat_map(|client| &mut client.tasks);
        let holds = holds.filter_map(|task| match task {
            Task::Holding(hold) => Some(&mut hold.token),
            _ => None,
        });
        let net = self
            .net
            .iter_mut()
            .filter_map(|message| match &mut message.packet {
                Packet::Acquired(token) | Packet::Write(token) => Some(token),
                _ => None,
            });
        let all: SmallVec<[&mut u8; 9]> = [store, resource].into_iter().chain(holds).chain(net).collect();
        let least = all.iter().map(|token| **token).min().unwrap_or(0);
        for token in all {
            *token -= least;
        }
    }
}

impl Client {
    /// Its holds.
    pub fn holds(&self) -> impl Iterator<Item = &Hold> {
        self.tasks.iter().filter_map(|task| match task {
            Task::Holding(hold) => Some(hold),
            _ => None,
        })
    }

    /// The hold on this grant.
    pub fn hold_of(&mut self, id: Id) -> Option<&mut Hold> {
        self.tasks.iter_mut().find_map(|task| match task {
            Task::Holding(hold) if hold.id == id => Some(hold),
            _ => None,
        })
    }

    /// Who is first in line.
    pub fn front(&self) -> Option<Which> {
        self.tasks.iter().position(|task| *task == Task::Waiting)
    }

    /// Whether one of its tasks is inside.
    pub fn is_inside(&self) -> bool {
        self.holds().next().is_some()
    }

    /// The acquire that somebody waits for.
    pub fn asking(&self) -> Option<&Attempt> {
        self.attempts.iter().find(|attempt| !attempt.abandoned)
    }
}
