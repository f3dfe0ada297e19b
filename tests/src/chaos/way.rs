//! The network between servers and a worker, whatever they speak.

use std::collections::HashMap;
use std::fmt::Debug;
use std::ops::Deref;

use crate::network::Protocol;
use crate::{Command, Door, Fault, Gateway, Held, NetFault, Proxy, Swallow};
use fastrand::Rng;

/// The network before a server.
pub(crate) trait Way: Debug + Send + Sync + Deref<Target = Door> {
    /// Closes all connections.
    fn cut(&self, reset: bool);
    /// Closes some of them, where they are told apart, or all.
    fn cut_some(&self, rng: &mut Rng);
    /// Swallows the reply to the `k`-th step from now on.
    fn swallow(&self, k: u64, then: Swallow) -> Box<dyn Struck>;
    /// Keeps the `k`-th step from now on.
    fn hold(&self, k: u64) -> Box<dyn Struck>;
    fn heal(&self);
    /// Forgets what went over it.
    fn forget(&self);
    /// How many connections clients have open.
    fn connections(&self) -> usize;
    /// See [`Proxy::tell_ports`]; others name no ports.
    fn tell_ports(&self, _ports: &HashMap<u16, u16>) {}
}

/// A fault of one step.
pub(crate) trait Struck: Send + Sync {
    fn fired(&self) -> bool;
    /// Lets go what is held.
    fn release(&self);
}

impl Way for Proxy {
    fn cut(&self, reset: bool) {
        match reset {
            true => self.reset(),
            false => self.cut(),
        };
    }

    fn cut_some(&self, rng: &mut Rng) {
        for connection in self.connections() {
            if rng.bool() {
                self.cut_connection(connection.id);
            }
        }
    }

    fn swallow(&self, k: u64, then: Swallow) -> Box<dyn Struck> {
        Box::new(self.swallow(k, then, Command::carries_steps))
    }

    fn hold(&self, k: u64) -> Box<dyn Struck> {
        Box::new(self.hold(k, Command::carries_steps))
    }

    fn heal(&self) {
        self.heal();
    }

    fn forget(&self) {
        self.forget();
    }

    fn connections(&self) -> usize {
        self.connections_open()
    }

    fn tell_ports(&self, ports: &HashMap<u16, u16>) {
        self.tell_ports(ports.clone());
    }
}

impl<P: Protocol> Way for Gateway<P> {
    fn cut(&self, _reset: bool) {
        self.cut();
    }

    fn cut_some(&self, rng: &mut Rng) {
        if rng.bool() {
            self.cut();
        }
    }

    fn swallow(&self, k: u64, then: Swallow) -> Box<dyn Struck> {
        Box::new(self.swallow(k, then, P::is_step))
    }

    fn hold(&self, k: u64) -> Box<dyn Struck> {
        Box::new(self.hold(k, P::is_step))
    }

    fn heal(&self) {
        self.heal();
    }

    fn forget(&self) {
        self.forget();
    }

    fn connections(&self) -> usize {
        self.connections_open()
    }
}

impl Struck for Fault {
    fn fired(&self) -> bool {
        self.fired()
    }

    fn release(&self) {}
}

impl Struck for Held {
    fn fired(&self) -> bool {
        self.fired()
    }

    fn release(&self) {
        self.release();
    }
}

impl Struck for NetFault {
    fn fired(&self) -> bool {
        self.fired()
    }

    fn release(&self) {
        self.release();
    }
}
