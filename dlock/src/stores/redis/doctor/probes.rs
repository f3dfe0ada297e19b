//! Promises that are tested on a scratch key: its script sets a TTL, and it is removed at the end.

use std::time::Duration;

use redis::Value;

use super::super::RedisStore;
use super::super::hint::PERMISSIONS;
use super::super::kinds::channel;
use super::facts::{Patient, Seen};
use crate::base::chance;
use crate::base::clock;
use crate::store::doctor::{Finding, judged_times};
use crate::store::{GrantId, Kind, Watch};

/// How long a scratch key stays if the doctor dies.
const SCRATCH_MS: &str = "5000";
/// How often an acquire, a renewal and a release are timed.
const ROUNDS: usize = 60;
/// How often a wake-up is timed.
const WAKE_UPS: usize = 20;
/// How long each of them is timed at most.
const LONGEST: Duration = Duration::from_secs(2);
/// How long to wait for a message.
const UNHEARD: Duration = Duration::from_secs(3);
/// Without a subscription a waiter is told to check more often than this.
const QUIET: Duration = Duration::from_millis(700);

const ACQUIRE: &str = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0";
const RENEW: &str = "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end return redis.call('PEXPIRE', KEYS[1], ARGV[2])";
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end return redis.call('DEL', KEYS[1])";
const SHORT: &str = "redis.call('SET', KEYS[1], 1, 'PX', 60000) redis.call('PEXPIRE', KEYS[1], ARGV[1]) return redis.call('PTTL', KEYS[1])";
/// Tries each command on a string, where most of them do nothing. Returns the names of those that the user may not use.
const PERMITTED: &str = "
redis.call('SET', KEYS[1], 'x', 'PX', ARGV[1])
local refused = {}
for i = 2, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do
    words[#words + 1] = word == 'KEY' and KEYS[1] or word
  end
  local reply = redis.pcall(unpack(words))
  if type(reply) == 'table' and reply.err then
    local text = string.lower(reply.err)
    for _, part in ipairs({'noperm', 'permission', \"can't run\", 'acl failure'}) do
      if string.find(text, part, 1, true) then
        refused[#refused + 1] = words[1]
        break
      end
    end
  end
end
redis.pcall('PEXPIRE', KEYS[1], ARGV[1])
redis.pcall('DEL', KEYS[1])
return refused";
/// The commands of docs/permissions.md, by kinds of locks: all kinds need the first group.
const COMMANDS: [(&str, &str); 6] = [
    (
        "locks",
        "TIME;HLEN KEY;HGETALL KEY;HGET KEY f;HEXISTS KEY f;HSET KEY f 1;HDEL KEY f;GET KEY;PTTL KEY;PEXPIRE KEY 5000",
    ),
    (
        "read-write locks",
        "ZADD KEY 1 m;ZCARD KEY;ZRANGE KEY 0 0;ZREM KEY m",
    ),
    (
        "fair locks",
        "LINDEX KEY 0;LINSERT KEY BEFORE a b;LLEN KEY;LPOS KEY a;LRANGE KEY 0 0;LREM KEY 0 a;LTRIM KEY 0 -1;\
         RPUSH KEY a;PERSIST KEY;ZMSCORE KEY m;ZSCORE KEY m",
    ),
    ("fenced locks", "INCR KEY"),
    (
        "semaphores",
        "INCRBY KEY 1;ZCOUNT KEY 0 1;ZREMRANGEBYSCORE KEY 0 0",
    ),
    ("records", "GETRANGE KEY 0 0;SETRANGE KEY 0 x;STRLEN KEY;TYPE KEY"),
];

/// Whether a subscription works: it reported so, and then nothing more.
async fn is_subscribed(watch: &mut Watch) -> bool {
    if tokio::time::timeout(UNHEARD, watch.changed()).await.is_err() {
        return false;
    }
    let until = clock::now() + UNHEARD;
    while clock::now() < until {
        if tokio::time::timeout(QUIET, watch.changed()).await.is_err() {
            return true;
        }
    }
    false
}

/// The tests on one server.
pub(super) struct Probe<'s, 'p, 'n> {
    store: &'s RedisStore,
    patient: &'p mut Patient<'n>,
    key: String,
    timeout: Duration,
}

impl<'s, 'p, 'n> Probe<'s, 'p, 'n> {
    pub(super) fn new(
        store: &'s RedisStore,
        patient: &'p mut Patient<'n>,
        timeout: Duration,
    ) -> Option<Probe<'s, 'p, 'n>> {
        let own = chance::uuid();
        let lane = patient.node.lane;
        // In a Cluster a key that this server has.
        let key = (0..10_000)
            .map(|n| format!("{}dlock:doctor:{{{n}}}:{own}", store.prefix))
            .find(|key| store.servers.lane_of(key) == lane)?;
        Some(Probe {
            store,
            patient,
            key,
            timeout,
        })
    }

    /// Runs all tests, and removes the scratch key.
    pub(super) async fn all(mut self) -> Vec<Finding> {
        let permissions = self.permissions().await;
        let expiry = self.expiry().await;
        let times = self.request_times().await;
        let [pubsub, wake_up] = self.messages().await;
        let key = self.key.clone();
        let _: Seen<i64> = self.patient.see(&["DEL", &key]).await;
        vec![times, wake_up, expiry, pubsub, permissions]
    }

    async fn eval<T: redis::FromRedisValue>(&mut self, script: &str, args: &[&str]) -> Seen<T> {
        let key = self.key.clone();
        let mut words = vec!["EVAL", script, "1", &key];
        words.extend(args);
        self.patient.see(&words).await
    }

    fn not_tried(&self, check: &'static str, why: &str) -> Finding {
        Finding::unknown(
            check,
            format!("not visible: {why}"),
            Some(format!(
                "let the user of the doctor use {}dlock:doctor:* ({PERMISSIONS})",
                self.store.prefix
            )),
        )
    }

    /// How long an acquire, a renewal and a release take.
    async fn request_times(&mut self) -> Finding {
        const CHECK: &str = "request-times";
        let (mut took, begun) = (Vec::new(), clock::now());
        for round in 0..ROUNDS {
            if round > 0 && clock::now().saturating_duration_since(begun) > LONGEST {
                break;
            }
            for script in [ACQUIRE, RENEW, RELEASE] {
                self.patient.pace().await;
                let mut cmd = redis::cmd("EVAL");
                cmd.arg(script)
                    .arg(1)
                    .arg(&self.key)
                    .arg("doctor")
                    .arg(SCRATCH_MS);
                let sent = clock::now();
                let reply = self.patient.node.plain(cmd).await;
                took.push(clock::now().saturating_duration_since(sent));
                match reply.map(redis::from_redis_value::<i64>) {
                    Ok(Ok(1)) => {}
                    Ok(other) => {
                        let why = format!("a script on a scratch key answered {other:?}");
                        return Finding::bad(
                            CHECK,
                            why,
                            "look at what is between here and the server: is it Redis?",
                        );
                    }
                    Err(error) => return self.not_tried(CHECK, &error.message),
                }
            }
        }
        judged_times(took, self.timeout)
    }

    /// Whether a key expires when its time is over, and not before.
    async fn expiry(&mut self) -> Finding {
        const CHECK: &str = "expiry";
        let left: Seen<i64> = self.eval(SHORT, &["200"]).await;
        let answered = clock::now();
        let left = match left {
            Ok(left) => left,
            Err(why) => return self.not_tried(CHECK, &why),
        };
        if !(100..=200).contains(&left) {
            let why = format!(
                "a key that was given 200 ms by a script has {left} ms: leases have no meaning there"
            );
            return Finding::bad(CHECK, why, "a server whose PEXPIRE works in scripts");
        }
        clock::sleep_until(answered + Duration::from_millis(220)).await;
        let key = self.key.clone();
        match self.patient.see::<i64>(&["EXISTS", &key]).await {
            Ok(0) => Finding::good(CHECK, "a key of 200 ms was gone after 220 ms"),
            Ok(_) => Finding::bad(
                CHECK,
                "a key of 200 ms was there after 220 ms: others wait longer for a lease than it lasts",
                "look at the server's clock, and at what is between",
            ),
            Err(why) => self.not_tried(CHECK, &why),
        }
    }

    /// Whether a message arrives, and how fast.
    async fn messages(&mut self) -> [Finding; 2] {
        const CHECKS: [&str; 2] = ["pubsub", "wake-up"];
        let grant = GrantId::new(chance::uuid(), 1);
        let channel = channel(Kind::Mutex, &self.key, grant);
        let mut watch = self.store.servers.watch(&self.key, channel.clone());
        // Reports that the subscription is confirmed.
        if !is_subscribed(&mut watch).await {
            let bad = Finding::bad(
                CHECKS[0],
                "no subscription stands: each waiter polls four times a second",
                format!(
                    "+subscribe (in a Cluster +ssubscribe) and &redisson_lock__channel:* for the user ({PERMISSIONS})"
                ),
            );
            return [
                bad,
                Finding::unknown(CHECKS[1], "no message was heard, so none was timed", None),
            ];
        }
        let mut took = Vec::new();
        let mut why = None;
        for publish in ["SPUBLISH", "PUBLISH"] {
            if publish == "SPUBLISH" && !self.store.servers.has_slots() {
                continue;
            }
            why = self.times(&mut watch, publish, &channel, &mut took).await.err();
            if why.is_none() {
                break;
            }
        }
        if let Some(why) = why {
            let bad = Finding::bad(
                CHECKS[0],
                format!("a message that was published did not arrive: {why}; each waiter polls then"),
                format!(
                    "+publish (in a Cluster +spublish) and &redisson_lock__channel:* for the user ({PERMISSIONS})"
                ),
            );
            return [
                bad,
                Finding::unknown(CHECKS[1], "no message was heard, so none was timed", None),
            ];
        }
        took.sort_unstable();
        let middle = took[took.len() / 2];
        let heard = format!(
            "a waiter hears of a release after {middle:.1?}, in the middle of {}",
            took.len()
        );
        let wake_up = match middle > Duration::from_millis(5) {
            true => Finding::bad(
                CHECKS[1],
                format!("{heard}: locks that many wait for change hands slowly"),
                "a nearer or less busy server",
            ),
            false => Finding::good(CHECKS[1], heard),
        };
        [Finding::good(CHECKS[0], "messages arrive"), wake_up]
    }

    async fn times(
        &mut self,
        watch: &mut Watch,
        publish: &str,
        channel: &str,
        took: &mut Vec<Duration>,
    ) -> Result<(), String> {
        took.clear();
        let begun = clock::now();
        for round in 0..WAKE_UPS {
            if round > 0 && clock::now().saturating_duration_since(begun) > LONGEST {
                break;
            }
            self.patient.pace().await;
            let mut cmd = redis::cmd(publish);
            cmd.arg(channel).arg("0");
            watch.seen();
            let sent = clock::now();
            let published = async {
                self.patient
                    .node
                    .plain(cmd)
                    .await
                    .map_err(|error| error.message)?;
                // It may arrive before this.
                std::future::pending::<Result<Value, String>>().await
            };
            tokio::select! {
                biased;
                () = watch.changed() => took.push(clock::now().saturating_duration_since(sent)),
                failed = published => return failed.map(drop),
                () = tokio::time::sleep(UNHEARD) => return Err(format!("not within {UNHEARD:?}")),
            }
        }
        Ok(())
    }

    /// Whether the user has the permissions of docs/permissions.md.
    async fn permissions(&mut self) -> Finding {
        const CHECK: &str = "permissions";
        let all: Vec<&str> = COMMANDS
            .iter()
            .flat_map(|(_, commands)| commands.split(';'))
            .collect();
        let mut args = vec![SCRATCH_MS];
        args.extend(all);
        let refused: Vec<String> = match self.eval(PERMITTED, &args).await {
            Ok(refused) => refused,
            Err(why) => return self.not_tried(CHECK, &why),
        };
        let mut missing = Vec::new();
        for (kind, commands) in COMMANDS {
            let names = commands
                .split(';')
                .filter_map(|command| command.split(' ').next());
            let of_kind: Vec<_> = names
                .filter(|name| refused.iter().any(|refused| refused == name))
                .map(str::to_lowercase)
                .collect();
            if !of_kind.is_empty() {
                missing.push((kind, of_kind.join(" +")));
            }
        }
        let told: Vec<_> = missing
            .iter()
            .map(|(kind, names)| format!("{kind} need +{names}"))
            .collect();
        match missing.first() {
            Some(("locks", names)) => Finding::bad(
                CHECK,
                format!("the user lacks what every lock needs: {}", told.join("; ")),
                format!("ACL SETUSER … +{names} ({PERMISSIONS})"),
            ),
            Some(_) => Finding::good(
                CHECK,
                format!("all that plain locks need; others not: {}", told.join("; ")),
            ),
            None => Finding::good(CHECK, "every command that locks and records use"),
        }
    }
}
