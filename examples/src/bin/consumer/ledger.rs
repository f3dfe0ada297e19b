//! The effect: an idempotent payment.
//!
//! A consumer can be killed after the payment and before the layer's record of it. The next attempt repeats the
//! payment, and nothing outside the effect could detect that it was made. So the effect itself depends on the
//! message's id, in one step of its resource: a unique key in a database, an idempotency key of a payment service, or
//! here a script.

use std::time::Duration;

use redis::Script;

use crate::connection::Connection;
use crate::stream::Message;

/// KEYS: the ledger, the balance, the newest fencing token of each message. ARGV: message, amount, token.
/// Returns 1 when it was paid now, 0 when it was paid before, -1 under an older token.
const PAY: &str = r#"
local newest = redis.call('HGET', KEYS[3], ARGV[1])
local function less(a, b)
  return #a < #b or (#a == #b and a < b)
end
if newest and less(ARGV[3], newest) then return -1 end
redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('INCRBY', KEYS[2], ARGV[2])
return 1
"#;

#[derive(Clone)]
pub(crate) struct Ledger {
    connection: Connection,
    pay: Script,
    name: String,
}

impl Ledger {
    pub(crate) async fn open(url: &str, name: &str) -> Result<Ledger, String> {
        Ok(Ledger {
            connection: Connection::open(url).await?,
            pay: Script::new(PAY),
            name: name.to_owned(),
        })
    }

    /// Pays, and returns a receipt: half of the work before the effect, and half after it.
    pub(crate) async fn pay(self, message: Message, takes: Duration) -> Result<String, String> {
        let Message { id, amount, claim } = message;
        let claim = claim.ok_or("the layer has told no claim")?;
        let (attempt, token) = (claim.attempt(), claim.fencing_token());
        let failed = |error: redis::RedisError| error.to_string();
        let name = &self.name;
        // Records the attempts, for inspection.
        let mut begins = redis::cmd("HINCRBY");
        begins.arg(format!("attempts:{name}")).arg(&id).arg(1);
        let step = async |mut connection| begins.query_async::<()>(&mut connection).await;
        self.connection.step(step).await.map_err(|error| {
            // A ledger that is down for long must not use up the attempts of its messages.
            claim.not_started();
            failed(error)
        })?;
        tokio::time::sleep(takes / 2).await;
        let mut call = self.pay.key(format!("ledger:{name}"));
        call.key(format!("balance:{name}")).key(format!("tokens:{name}"));
        call.arg(&id).arg(amount).arg(token);
        let step = async |mut connection| call.invoke_async(&mut connection).await;
        let answer: i64 = self.connection.step(step).await.map_err(failed)?;
        tokio::time::sleep(takes / 2).await;
        match answer {
            -1 => Err(format!("token {token} is older than that of another attempt")),
            0 => Ok(format!(
                "{amount} paid by an earlier attempt, found by attempt {attempt}"
            )),
            _ => Ok(format!("{amount} paid by attempt {attempt}")),
        }
    }
}
