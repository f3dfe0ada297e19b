//! Steps that make a plan smaller.

use serde_json::{Map, Value, json};

use super::Shrinker;

/// What is no amount: it names something, or has its own move.
const NAMES: &[&str] = &["key", "semaphore", "process", "store", "drift", "seed"];
/// Of a storm, in a thousand; [`storms`] has moves for them.
const CHANCES: &[&str] = &["lost", "late", "doubled", "broken"];
/// Below this an amount is no longer one that the library takes, or that worlds are drawn with.
const LEAST: &[(&str, u64)] = &[
    ("fixed_lease", 100),
    ("lease", 100),
    ("max_hold", 100),
    ("wait", 1),
    ("min_hold", 1),
];
/// The plainest of each choice.
const PLAIN: &[(&str, &[&str])] = &[("end", &["release", "drop"]), ("way", &["both"])];

/// Tries everything once.
pub(super) fn all(shrinker: &mut Shrinker) {
    world(shrinker);
    processes(shrinker);
    everywhere(shrinker);
    storms(shrinker);
    elements(shrinker);
    hoists(shrinker);
    options(shrinker);
    kinds(shrinker);
    choices(shrinker);
    numbers(shrinker);
    keys(shrinker);
}

/// What holds for the world as a whole.
fn world(shrinker: &mut Shrinker) {
    let others = [
        ("runtimes", json!("one")),
        ("stores", json!("one")),
        ("stores", json!({"quorum": 3})),
        ("scheduler", json!("in_order")),
        ("network", json!({"least": 2, "most": 2})),
    ];
    for (name, value) in others {
        let mut candidate = shrinker.plan.clone();
        if candidate[name] == value || name == "stores" && candidate[name] == "one" {
            continue;
        }
        candidate[name] = value.clone();
        if name == "stores" {
            let members = value["quorum"].as_u64().unwrap_or(1);
            let exists = |fault: &Value| store_of(fault).is_none_or(|store| store < members);
            if let Some(faults) = candidate["faults"].as_array_mut() {
                faults.retain(exists);
            }
        }
        shrinker.takes(candidate);
    }
    let calm = |plan: &mut Value| {
        for process in plan["processes"].as_array_mut().into_iter().flatten() {
            process.as_object_mut().map(|process| process.remove("drift"));
        }
    };
    attempt(shrinker, calm);
    for process in 0..count(&shrinker.plan, "/processes") {
        attempt(shrinker, |plan| {
            plan["processes"][process]
                .as_object_mut()
                .map(|process| process.remove("drift"));
        });
    }
}

fn store_of(fault: &Value) -> Option<u64> {
    fault["what"].as_object()?.values().next()?["store"].as_u64()
}

/// Removes processes, and their faults.
fn processes(shrinker: &mut Shrinker) {
    let mut at = count(&shrinker.plan, "/processes");
    while at > 0 {
        at -= 1;
        attempt(shrinker, |plan| {
            if let Some(all) = plan["processes"].as_array_mut() {
                all.remove(at);
            }
            if let Some(faults) = plan["faults"].as_array_mut() {
                faults.retain_mut(|fault| forget_process(&mut fault["what"], at as u64));
            }
        });
    }
}

/// Whether a fault is still one when this process is not there; the numbers of those behind change.
fn forget_process(what: &mut Value, gone: u64) -> bool {
    let Some(trouble) = what.as_object_mut() else {
        return true;
    };
    for trouble in trouble.values_mut() {
        match trouble["process"].as_u64() {
            Some(process) if process == gone => return false,
            Some(process) if process > gone => trouble["process"] = (process - 1).into(),
            _ => {}
        }
    }
    true
}

/// Removes common parts at once: later tasks of users, all work, each optional field.
fn everywhere(shrinker: &mut Shrinker) {
    for most in [0, 1, 2, 4, 8] {
        attempt(shrinker, |plan| {
            for at in pointers(plan, &|value, at| value.is_array() && at.ends_with("/tasks")) {
                if let Some(tasks) = plan.pointer_mut(&at).and_then(Value::as_array_mut) {
                    tasks.truncate(most);
                }
            }
        });
    }
    attempt(shrinker, |plan| {
        for at in pointers(plan, &|value, at| value.is_array() && at.ends_with("/work")) {
            put(plan, &at, json!([]));
        }
    });
    let locks = pointers(&shrinker.plan, &|value, _| is_lock(value));
    let mut names: Vec<_> = locks
        .iter()
        .filter_map(|at| shrinker.plan.pointer(at)?.as_object())
        .flat_map(|lock| lock.keys().cloned())
        .filter(|name| name != "wait" && !NAMES.contains(&name.as_str()))
        .collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        attempt(shrinker, |plan| {
            for at in &locks {
                let lock = plan.pointer_mut(at).and_then(Value::as_object_mut);
                lock.map(|lock| lock.remove(&name));
            }
        });
    }
}

/// Reduces storms to one frequent fault: a plan that depends on rare events allows few other moves.
fn storms(shrinker: &mut Shrinker) {
    for at in pointers(&shrinker.plan, &|_, at| at.ends_with("/what/storm")) {
        let chance_now = |plan: &Value, name: &str| plan.pointer(&at).and_then(|storm| storm[name].as_u64());
        let alone = CHANCES.iter().any(|only| {
            [1000, 500, 200, 50].into_iter().any(|chance| {
                let is_now = CHANCES.iter().all(|name| {
                    let now = chance_now(&shrinker.plan, name).unwrap_or_default();
                    if name == only { now >= chance } else { now == 0 }
                });
                is_now
                    || attempt(shrinker, |plan| {
                        for name in CHANCES {
                            put(
                                plan,
                                &format!("{at}/{name}"),
                                json!(if name == only { chance } else { 0 }),
                            );
                        }
                    })
            })
        });
        if !alone {
            for name in CHANCES {
                if chance_now(&shrinker.plan, name) != Some(0) {
                    attempt(shrinker, |plan| put(plan, &format!("{at}/{name}"), json!(0)));
                }
            }
        }
    }
}

/// Takes elements out of arrays: halves first, then quarters, and at last each alone.
fn elements(shrinker: &mut Shrinker) {
    let mut done = 0;
    loop {
        // Those of the plan as it is now: from the outside inwards.
        let arrays = pointers(&shrinker.plan, &|value, at| {
            value.is_array() && at != "/processes" && at != "/semaphores"
        });
        let Some(at) = arrays.get(done) else { return };
        let mut size = count(&shrinker.plan, at).div_ceil(2);
        while size > 0 {
            let mut from = count(&shrinker.plan, at);
            while from > 0 {
                let to = from;
                from = from.saturating_sub(size);
                attempt(shrinker, |plan| {
                    if let Some(all) = plan.pointer_mut(at).and_then(Value::as_array_mut) {
                        all.drain(from..to);
                    }
                });
                if shrinker.is_over() {
                    return;
                }
            }
            size = if size == 1 { 0 } else { size.div_ceil(2) };
        }
        done += 1;
    }
}

/// Puts what is inside of a lock in its place.
fn hoists(shrinker: &mut Shrinker) {
    let mut done = 0;
    loop {
        let locks = pointers(&shrinker.plan, &|value, _| is_lock(value));
        let Some(at) = locks.get(done) else { return };
        let inner: Vec<_> = locks
            .iter()
            .filter(|other| other.len() > at.len() && other.starts_with(&format!("{at}/")))
            .cloned()
            .collect();
        let hoisted = inner.iter().any(|inner| {
            attempt(shrinker, |plan| {
                let value = plan.pointer(inner).cloned().unwrap_or_default();
                put(plan, at, value);
            })
        });
        if !hoisted {
            done += 1;
        }
        if shrinker.is_over() {
            return;
        }
    }
}

fn is_lock(value: &Value) -> bool {
    value.get("work").is_some()
}

/// Removes fields that have a default.
fn options(shrinker: &mut Shrinker) {
    for at in pointers(&shrinker.plan, &|value, _| value.is_object()) {
        let names: Vec<_> = match shrinker.plan.pointer(&at) {
            Some(Value::Object(fields)) => fields.keys().cloned().collect(),
            _ => continue,
        };
        for name in names {
            // Nested locks wait for a limited time, or users may wait for each other for ever.
            let is_limit = name == "wait" && (at.contains("/work/") || at.contains("/reading/"));
            if !is_limit && !NAMES.contains(&name.as_str()) {
                attempt(shrinker, |plan| {
                    let object = plan.pointer_mut(&at).and_then(Value::as_object_mut);
                    object.map(|object: &mut Map<String, Value>| object.remove(&name));
                });
            }
        }
    }
}

/// Makes all locks of a key plain: those of other kinds would refuse each other.
fn kinds(shrinker: &mut Shrinker) {
    let locks = pointers(&shrinker.plan, &|value, _| {
        value["key"].is_u64() && value["kind"].is_string()
    });
    let key_of = |plan: &Value, at: &str| plan.pointer(at).map(|lock| lock["key"].clone());
    let mut keys: Vec<_> = locks.iter().map(|at| key_of(&shrinker.plan, at)).collect();
    keys.sort_unstable_by_key(|key| key.as_ref().and_then(Value::as_u64));
    keys.dedup();
    for key in keys {
        attempt(shrinker, |plan| {
            for at in &locks {
                if key_of(plan, at) == key {
                    put(plan, &format!("{at}/kind"), json!("plain"));
                }
            }
        });
    }
}

/// Chooses what is plainest.
fn choices(shrinker: &mut Shrinker) {
    let is_choice = |_: &Value, at: &str| PLAIN.iter().any(|(name, _)| at.ends_with(&format!("/{name}")));
    for at in pointers(&shrinker.plan, &is_choice) {
        let name = at.rsplit('/').next().unwrap_or_default();
        let plain = PLAIN.iter().find(|(of, _)| *of == name);
        for choice in plain.into_iter().flat_map(|(_, choices)| *choices) {
            if shrinker.plan.pointer(&at).and_then(Value::as_str) == Some(*choice)
                || attempt(shrinker, |plan| put(plan, &at, json!(choice)))
            {
                break;
            }
        }
    }
}

/// Makes amounts smaller and rounder.
fn numbers(shrinker: &mut Shrinker) {
    let is_amount = |value: &Value, at: &str| {
        let name = at.rsplit('/').next().unwrap_or_default();
        let is_inside = at.starts_with("/processes/") || at.starts_with("/faults/");
        value.is_u64()
            && is_inside
            && !NAMES.contains(&name)
            && !CHANCES.contains(&name)
            && !at.contains("/also/")
    };
    for at in pointers(&shrinker.plan, &is_amount) {
        let name = at.rsplit('/').next().unwrap_or_default();
        let least = LEAST
            .iter()
            .find(|(of, _)| *of == name)
            .map_or(0, |(_, least)| *least);
        while let Some(now) = shrinker.plan.pointer(&at).and_then(Value::as_u64) {
            let smaller = smaller(now)
                .into_iter()
                .filter(|value| *value >= least && *value < now);
            let took = smaller
                .into_iter()
                .any(|value| attempt(shrinker, |plan| put(plan, &at, json!(value))));
            if !took || shrinker.is_over() {
                break;
            }
        }
    }
}

/// From the smallest on.
fn smaller(now: u64) -> Vec<u64> {
    let digits = now.checked_ilog10().unwrap_or(0);
    let round = |digits: u32| {
        let unit = 10_u64.pow(digits);
        now / unit * unit
    };
    let mut all = vec![
        0,
        1,
        10,
        100,
        now / 4,
        now / 2,
        now / 4 * 3,
        round(digits),
        round(digits.saturating_sub(1)),
    ];
    all.sort_unstable();
    all.dedup();
    all
}

/// Numbers the keys from zero on: their order stays, which nested locks are taken in.
fn keys(shrinker: &mut Shrinker) {
    if shrinker.plan["semaphores"].is_array() {
        // They are named by their place there.
        return;
    }
    let named = |value: &Value, at: &str| value.is_u64() && (at.ends_with("/key") || at.contains("/also/"));
    let at = pointers(&shrinker.plan, &named);
    let mut old: Vec<_> = at
        .iter()
        .filter_map(|at| shrinker.plan.pointer(at)?.as_u64())
        .collect();
    old.sort_unstable();
    old.dedup();
    attempt(shrinker, |plan| {
        for at in &at {
            let key = plan.pointer(at).and_then(Value::as_u64).unwrap_or_default();
            let new = old.iter().position(|old| *old == key).unwrap_or_default();
            put(plan, at, json!(new));
        }
    });
}

/// Changes the plan, if that is one that still breaks the promise.
fn attempt<T>(shrinker: &mut Shrinker, change: impl FnOnce(&mut Value) -> T) -> bool {
    let mut candidate = shrinker.plan.clone();
    change(&mut candidate);
    candidate != shrinker.plan && shrinker.takes(candidate)
}

fn put(plan: &mut Value, at: &str, value: Value) {
    if let Some(place) = plan.pointer_mut(at) {
        *place = value;
    }
}

fn count(plan: &Value, at: &str) -> usize {
    plan.pointer(at).and_then(Value::as_array).map_or(0, Vec::len)
}

/// Where there are such values: what is outside comes before what is in it.
fn pointers(plan: &Value, is_one: &dyn Fn(&Value, &str) -> bool) -> Vec<String> {
    fn walk(value: &Value, at: &str, is_one: &dyn Fn(&Value, &str) -> bool, found: &mut Vec<String>) {
        if is_one(value, at) {
            found.push(at.to_owned());
        }
        match value {
            Value::Array(all) => {
                for (index, value) in all.iter().enumerate() {
                    walk(value, &format!("{at}/{index}"), is_one, found);
                }
            }
            Value::Object(all) => {
                for (name, value) in all {
                    walk(value, &format!("{at}/{name}"), is_one, found);
                }
            }
            _ => {}
        }
    }
    let mut found = Vec::new();
    walk(plan, "", is_one, &mut found);
    found
}
