//! Promises that are tested on a scratch key: its script sets a TTL, and it is removed at the end.

use std::time::Duration;

use redis::Value;

use super::super::RedisStore;
use super::super::hint::PERMISSIONS;
use super::super::kinds::channel;
use super::facts::{Patient, Seen, why};
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
/// Tries each command on a string, where most of them do nothing. Returns the names of those that the user may not use. If it
/// may not write the string, no other is tried: it would make a key without a TTL.
const PERMITTED: &str = "
local function is_refused(reply)
  if type(reply) ~= 'table' or not reply.err then return false end
  local text = string.lower(reply.err)
  for _, part in ipairs({'noperm', 'permission', \"can't run\", 'acl failure'}) do
    if string.find(text, part, 1, true) then return true end
  end
  return false
end
local begun = redis.pcall('SET', KEYS[1], 'x', 'PX', ARGV[1])
if is_refused(begun) then return {'SET'} end
if begun.err then return begun end
local refused = {}
for i = 2, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do
    words[#words + 1] = word == 'KEY' and KEYS[1] or word
  end
  if is_refused(redis.pcall(unpack(words))) then refused[#refused + 1] = words[1] end
end
return refused";
/// A script that no server has.
const NO_SCRIPT: &str = "0000000000000000000000000000000000000000";
/// The commands of docs/permissions.md, by kinds of locks: all kinds need the first group. It is tried last, and ends with
/// what gives the key its TTL and removes it.
const COMMANDS: [(&str, &str); 6] = [
    (
        "locks",
        "TIME;HLEN KEY;HGETALL KEY;HGET KEY f;HEXISTS KEY f;HSET KEY f 1;HDEL KEY f;GET KEY;PTTL KEY;PEXPIRE KEY 5000;\
         SET KEY x PX 5000;DEL KEY",
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

/// Whether the server refused a command, and not its key or channel.
fn is_of_a_command(why: &str) -> bool {
    ["permissions to run", "can't run"]
        .iter()
        .any(|part| why.contains(part))
}

/// Whether the server refused a key or a channel.
fn is_of_a_name(why: &str) -> bool {
    why.contains("permissions to access")
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
        let removed: Seen<i64> = self.patient.see(&["DEL", &key]).await;
        let mut findings = vec![times, wake_up, expiry, pubsub, permissions];
        if let Err(why) = removed
            && is_of_a_command(&why)
        {
            let why = format!("the key of the trials, {key}, could not be removed, and stays for 5 s: {why}");
            findings.push(Finding::bad("scratch", why, format!("+del ({PERMISSIONS})")));
        }
        findings
    }

    async fn eval<T: redis::FromRedisValue>(&mut self, script: &str, args: &[&str]) -> Seen<T> {
        let key = self.key.clone();
        let mut words = vec!["EVAL", script, "1", &key];
        words.extend(args);
        self.patient.see(&words).await
    }

    fn not_tried(&self, check: &'static str, why: &str) -> Finding {
        let remedy = match is_of_a_command(why) {
            true => format!("the commands that every lock needs ({PERMISSIONS})"),
            false => format!(
                "let the user of the doctor use {}dlock:doctor:* ({PERMISSIONS})",
                self.store.prefix
            ),
        };
        Finding::unknown(check, format!("not visible: {why}"), Some(remedy))
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
                    Err(error) => return self.not_tried(CHECK, why(&error)),
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
        let unheard = |bad: Finding| {
            let timed = Finding::unknown(CHECKS[1], "no message was heard, so none was timed", None);
            [bad, timed]
        };
        let publish_commands: &[&str] = match self.store.servers.has_slots() {
            true => &["SPUBLISH", "PUBLISH"],
            false => &["PUBLISH"],
        };
        let mut unpublished = None;
        for publish in publish_commands {
            let reply: Seen<i64> = self.patient.see(&[publish, &channel, "0"]).await;
            unpublished = reply.err();
            // That says nothing about the channels of locks.
            if let Some(why) = unpublished.as_ref().filter(|why| is_of_a_name(why)) {
                let (why, prefix) = (format!("not visible: {why}"), &self.store.prefix);
                let remedy = format!(
                    "let the user of the doctor use &redisson_lock__channel:{prefix}dlock:doctor:* ({PERMISSIONS})"
                );
                return CHECKS.map(|check| Finding::unknown(check, why.clone(), Some(remedy.clone())));
            }
            if unpublished.is_none() {
                break;
            }
        }
        let may_publish = format!("+publish (in a Cluster +spublish) for the user ({PERMISSIONS})");
        if let Some(why) = unpublished {
            let why = format!("no message can be published: {why}; each waiter polls then");
            return unheard(Finding::bad(CHECKS[0], why, may_publish));
        }
        let mut watch = self.store.servers.watch(&self.key, channel.clone());
        // Reports that the subscription is confirmed.
        if !is_subscribed(&mut watch).await {
            return unheard(Finding::bad(
                CHECKS[0],
                "no subscription stands: each waiter polls four times a second",
                format!("+subscribe (in a Cluster +ssubscribe) for the user ({PERMISSIONS})"),
            ));
        }
        let mut took = Vec::new();
        let mut why = None;
        for publish in publish_commands {
            why = self.times(&mut watch, publish, &channel, &mut took).await.err();
            if why.is_none() {
                break;
            }
        }
        if let Some(why) = why {
            let why = format!("a message that was published did not arrive: {why}; each waiter polls then");
            return unheard(Finding::bad(CHECKS[0], why, may_publish));
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
                    .map_err(|error| why(&error).to_owned())?;
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
        let all = COMMANDS.iter().rev();
        let mut args = vec![SCRATCH_MS];
        args.extend(all.flat_map(|(_, commands)| commands.split(';')));
        let refused: Vec<String> = match self.eval(PERMITTED, &args).await {
            Ok(refused) => refused,
            Err(why) => return self.not_tried(CHECK, &why),
        };
        let by_hash: Seen<Value> = self.patient.see(&["EVALSHA", NO_SCRIPT, "0"]).await;
        let needs_by_hash = by_hash.is_err_and(|why| is_of_a_command(&why));
        let mut missing = Vec::new();
        for (kind, commands) in COMMANDS {
            let names = commands
                .split(';')
                .filter_map(|command| command.split(' ').next());
            let mut of_kind: Vec<_> = names
                .filter(|name| refused.iter().any(|refused| refused == name))
                .map(str::to_lowercase)
                .collect();
            if kind == "locks" && needs_by_hash {
                of_kind.push("evalsha".to_owned());
            }
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
