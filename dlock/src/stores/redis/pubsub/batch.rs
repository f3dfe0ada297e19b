//! Subscription commands in flight together.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisError, Value};
use tokio::time::Instant;

/// One batch; the next one is sent when this one is complete.
pub(super) struct Batch {
    /// An answer to each command, in order of arrival.
    coming: Pin<Box<dyn Future<Output = Result<Vec<Value>, RedisError>> + Send>>,
    answers: Option<Vec<Value>>,
    /// How many commands end a subscription; they come first.
    leaving: usize,
    /// The requested channels after that.
    asked: Vec<Arc<str>>,
    /// The channel of the last push, until it has come.
    mark: Option<String>,
    deadline: Instant,
}

impl Batch {
    /// Sends the commands: unsubscribes first, then one per requested channel, and, if the server may send pushes, one
    /// more with this mark. A batch without commands tests the connection.
    pub(super) fn send(
        mut commands: Pipeline,
        leaving: usize,
        asked: Vec<Arc<str>>,
        mark: Option<String>,
        mut sink: MultiplexedConnection,
        deadline: Instant,
    ) -> Batch {
        let mut count = leaving + asked.len();
        if let Some(mark) = &mark {
            // There is no such subscription: the server still answers with a push.
            commands.cmd("UNSUBSCRIBE").arg(mark);
            count += 1;
        } else if count == 0 {
            commands.cmd("PING");
            count = 1;
        }
        Batch {
            coming: Box::pin(async move { sink.send_packed_commands(&commands, 0, count).await }),
            answers: None,
            leaving,
            asked,
            mark,
            deadline,
        }
    }

    /// Waits for the answers. Fails with the trouble of the connection, or without one if something is missing after
    /// the timeout. May be dropped and called again.
    pub(super) async fn answered(&mut self) -> Result<(), Option<String>> {
        let coming = async {
            match self.answers {
                None => (&mut self.coming).await,
                // A push is missing.
                Some(_) => std::future::pending().await,
            }
        };
        match tokio::time::timeout_at(self.deadline, coming).await {
            Ok(Ok(answers)) => self.answers = Some(answers),
            Ok(Err(error)) => return Err(Some(error.to_string())),
            Err(_) => return Err(None),
        }
        Ok(())
    }

    /// A subscription to this channel has ended.
    pub(super) fn ended(&mut self, channel: &str) {
        self.mark.take_if(|mark| mark == channel);
    }

    /// Whether everything that belongs to it has come.
    pub(super) fn is_over(&self) -> bool {
        // A user that may not unsubscribe gets no push either: then the last answer must suffice.
        let is_refused = |answers: &Vec<Value>| matches!(answers.last(), Some(Value::ServerError(_)));
        let answers = self.answers.as_ref();
        answers.is_some_and(|answers| self.mark.is_none() || is_refused(answers))
    }

    /// Returns the requested channels, each with its refusal if there is one at its position. The positions match
    /// unless the server has sent pushes in between.
    pub(super) fn refusals(self) -> impl Iterator<Item = (Arc<str>, Option<RedisError>)> {
        let mut answers = self.answers.into_iter().flatten().skip(self.leaving);
        self.asked.into_iter().map(move |channel| {
            let refusal = match answers.next() {
                Some(Value::ServerError(error)) => Some(error.into()),
                _ => None,
            };
            (channel, refusal)
        })
    }
}
