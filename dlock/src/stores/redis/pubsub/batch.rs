//! Commands about subscriptions that are under way together.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use redis::{Pipeline, RedisError, Value};
use tokio::time::Instant;

/// One batch; the next one goes out when all has come that belongs to it.
pub(super) struct Batch {
    /// An answer to each command, in the order in which they come.
    coming: Pin<Box<dyn Future<Output = Result<Vec<Value>, RedisError>> + Send>>,
    answers: Option<Vec<Value>>,
    /// How many commands end a subscription; they come first.
    leaving: usize,
    /// What is asked for after that.
    asked: Vec<Arc<str>>,
    /// What the last push is about, unless that has come.
    mark: Option<String>,
    deadline: Instant,
}

impl Batch {
    /// Sends the commands: those that end a subscription, one for each channel that is asked for, and, where the server
    /// may speak unasked, one more with this mark. One without commands tests the connection.
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
            // There is no subscription there: it is answered all the same, by a push.
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

    /// Until the answers are there. An error with what is wrong with the connection, or none where something is missing
    /// when its time is up. May be dropped and called again.
    pub(super) async fn answered(&mut self) -> Result<(), Option<String>> {
        let coming = async {
            match self.answers {
                None => (&mut self.coming).await,
                // What is missing is a push.
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

    /// Whether all has come that belongs to it.
    pub(super) fn is_over(&self) -> bool {
        // A user that may not end subscriptions is told of no end either: then the last answer has to do.
        let is_refused = |answers: &Vec<Value>| matches!(answers.last(), Some(Value::ServerError(_)));
        let answers = self.answers.as_ref();
        answers.is_some_and(|answers| self.mark.is_none() || is_refused(answers))
    }

    /// What was asked for, each with its refusal if there is one at its position. They are at their positions unless
    /// the server has spoken unasked.
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
