//! Which reply answers which command.

use std::collections::{HashMap, HashSet, VecDeque};

use bytes::Bytes;

use super::fault::Tracker;
use crate::network::Swallow;
use crate::resp::{Command, Reply, ReplyKind};

/// A command whose reply is still to come.
#[derive(Default)]
pub(super) struct Pending {
    /// For a (un)subscription: its word, and how many confirmations are still to come.
    pub(super) confirmations: Option<(String, usize)>,
    pub(super) channels: Vec<Bytes>,
    pub(super) trackers: Vec<Tracker>,
    pub(super) swallow: Option<Swallow>,
}

pub(super) enum Answer {
    To(Option<Swallow>),
    Message,
}

/// Which reply answers which command. Replies come in the order of the commands, but published messages come in
/// between, and a subscription is answered once for each channel.
#[derive(Default)]
pub(super) struct Pairing {
    pub(super) waiting: VecDeque<Pending>,
    pub(super) subscribed: HashMap<&'static str, HashSet<Bytes>>,
    pub(super) subscriber: bool,
}

impl Pairing {
    pub(super) fn sent(&mut self, command: &Command, mut pending: Pending) {
        let word = command.name().to_ascii_lowercase();
        let kind = match word.as_str() {
            "subscribe" | "unsubscribe" => Some("channel"),
            "psubscribe" | "punsubscribe" => Some("pattern"),
            "ssubscribe" | "sunsubscribe" => Some("shard"),
            _ => None,
        };
        if let Some(kind) = kind {
            self.subscriber = true;
            let channels = &command.args()[1..];
            let subscribed = self.subscribed.entry(kind).or_default();
            let mut count = channels.len();
            if !word.contains("unsubscribe") {
                subscribed.extend(channels.iter().cloned());
                pending.channels = channels.to_vec();
            } else if channels.is_empty() {
                // it stands for all of them, and one confirmation comes even when there are none
                count = subscribed.drain().count().max(1);
            } else {
                subscribed.retain(|channel| !channels.contains(channel));
            }
            // one without channels is answered by a plain error
            pending.confirmations = (count > 0).then_some((word, count));
        }
        self.waiting.push_back(pending);
    }

    pub(super) fn answered(&mut self, reply: &Reply) -> Answer {
        if let ReplyKind::Tagged { word, push } = &reply.kind
            && (*push || self.subscriber)
        {
            if let Some((expected, left)) = self
                .waiting
                .front_mut()
                .and_then(|first| first.confirmations.as_mut())
                && expected == word
            {
                *left -= 1;
                if *left > 0 {
                    return Answer::To(None);
                }
            } else if *push
                || matches!(
                    word.as_str(),
                    "message" | "pmessage" | "smessage" | "sunsubscribe"
                )
            {
                let message = word.ends_with("message");
                return if message {
                    Answer::Message
                } else {
                    Answer::To(None)
                };
            }
        }
        let Some(pending) = self.waiting.pop_front() else {
            return Answer::To(None);
        };
        if reply.kind == ReplyKind::Error {
            // a refused subscription has subscribed to nothing
            for channels in self.subscribed.values_mut() {
                channels.retain(|channel| !pending.channels.contains(channel));
            }
        }
        for tracker in pending.trackers {
            tracker.send_modify(|progress| progress.reply = Some(reply.raw.clone()));
        }
        Answer::To(pending.swallow)
    }
}
