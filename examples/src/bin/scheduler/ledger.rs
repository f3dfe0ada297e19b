//! The last run of each job, and its token.
//!
//! This is the resource that checks the token. A leader that was stopped and resumes may try to begin a run while
//! another process leads; its token is older than the stored token, so the run is refused.

use std::collections::HashMap;
use std::time::Duration;

use redis::{AsyncConnectionConfig, Client, Script};
use tokio::sync::Mutex;

/// How long the server may take to accept a connection, and to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// KEYS: the job. ARGV: the beginning of the period, our token, and whether we have asked for it before, without an answer.
/// Returns that the run may begin, that this period's or a later one has begun, or that a leader has a newer token.
const BEGIN: &str = r#"
local last = redis.call('HMGET', KEYS[1], 'slot', 'token', 'by')
local function less(a, b)
  return #a < #b or (#a == #b and a < b)
end
if last[2] and less(ARGV[2], last[2]) then return {'fenced', last[2]} end
redis.call('HSET', KEYS[1], 'token', ARGV[2])
if ARGV[3] == '1' and last[1] == ARGV[1] and last[3] == ARGV[2] then return {'begins', ARGV[1]} end
if last[1] and not less(last[1], ARGV[1]) then return {'begun', last[1]} end
redis.call('HSET', KEYS[1], 'slot', ARGV[1], 'by', ARGV[2])
return {'begins', ARGV[1]}
"#;

/// Why a run may not begin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The last run is that of this period, or of a later one, here or elsewhere.
    Begun(u64),
    /// A newer leader has been here, with this token.
    Fenced(u64),
    /// Unknown.
    Unavailable(String),
}

/// The notes of all jobs.
pub(crate) enum Ledger {
    /// In this process: the beginning of the last period, and the token, of each job.
    Memory(Mutex<HashMap<String, (u64, u64)>>),
    /// On a Redis server, for the whole fleet.
    Redis(Box<RedisLedger>),
}

pub(crate) struct RedisLedger {
    client: Client,
    begin: Script,
    prefix: String,
}

impl Ledger {
    pub(crate) fn open(url: &str, name: &str) -> Result<Ledger, String> {
        if url.starts_with("memory:") {
            return Ok(Ledger::Memory(Mutex::default()));
        }
        // The URL may hold a password, and is not repeated.
        let client = Client::open(url).map_err(|_| "--url is none of a Redis server".to_owned())?;
        Ok(Ledger::Redis(Box::new(RedisLedger {
            client,
            begin: Script::new(BEGIN),
            prefix: format!("ledger:{name}"),
        })))
    }

    /// Records that the run of the period that begins at `slot` begins. The ledger keeps times, which do not go back when
    /// the period of a job changes, as the number of its current period does.
    pub(crate) async fn begin(&self, job: &str, slot: u64, token: u64) -> Result<(), Refusal> {
        self.begins(job, slot, token, false).await
    }

    /// The same after a [`begin`](Self::begin) without an answer, which may have noted the run: it may begin then, too.
    pub(crate) async fn begin_again(&self, job: &str, slot: u64, token: u64) -> Result<(), Refusal> {
        self.begins(job, slot, token, true).await
    }

    async fn begins(&self, job: &str, slot: u64, token: u64, again: bool) -> Result<(), Refusal> {
        let redis = match self {
            Ledger::Memory(notes) => {
                let mut notes = notes.lock().await;
                let last = notes.entry(job.to_owned()).or_default();
                if last.1 > token {
                    return Err(Refusal::Fenced(last.1));
                }
                let begun = last.0;
                *last = (begun.max(slot), token);
                return match slot > begun {
                    true => Ok(()),
                    false => Err(Refusal::Begun(begun)),
                };
            }
            Ledger::Redis(redis) => redis,
        };
        let unavailable = |error: redis::RedisError| Refusal::Unavailable(error.to_string());
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        // Runs are rare, so each opens its own connection; a broken connection is never kept.
        let connection = redis.client.get_multiplexed_async_connection_with_config(&config);
        let mut connection = connection.await.map_err(unavailable)?;
        let mut call = redis.begin.key(format!("{}:{job}", redis.prefix));
        call.arg(slot).arg(token).arg(u8::from(again));
        let (answer, number): (String, u64) =
            call.invoke_async(&mut connection).await.map_err(unavailable)?;
        match answer.as_str() {
            "begins" => Ok(()),
            "begun" => Err(Refusal::Begun(number)),
            _ => Err(Refusal::Fenced(number)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_run_begins_once_and_never_under_an_older_token() {
        let ledger = Ledger::open("memory://", "l").unwrap();
        assert_eq!(ledger.begin("a", 5, 10).await, Ok(()));
        assert_eq!(ledger.begin("a", 5, 10).await, Err(Refusal::Begun(5)));
        assert_eq!(ledger.begin("a", 4, 11).await, Err(Refusal::Begun(5)));
        assert_eq!(ledger.begin("a", 6, 10).await, Err(Refusal::Fenced(11)));
        assert_eq!(ledger.begin("a", 6, 11).await, Ok(()));
        assert_eq!(ledger.begin("b", 6, 10).await, Ok(()));
    }
}
