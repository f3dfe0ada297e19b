"use strict";
const $ = (id) => document.getElementById(id);
/** Where the console is mounted, behind whatever: the page is its root. */
const BASE = location.pathname.replace(/\/*$/, "/");
const EVERY = 1000;
const PATIENCE = 15000;

// ---- texts of others: shown as text only, with what could look like something else escaped

// Emoji have variation selectors.
const WILD = /(?![\uFE00-\uFE0F])[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{DI}\u2028\u2029]/gu;
const shown = (text) => String(text).replace(WILD, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = shown(text);
  return made;
};
const put = (node, text, className) => {
  const escaped = shown(text);
  if (node.textContent !== escaped) node.textContent = escaped;
  if (className !== undefined && node.className !== className) node.className = className;
};
const lasting = (ms) => {
  if (ms === null || ms === undefined) return "unknown";
  const s = Math.floor(ms / 1000);
  if (s < 1) return `${ms} ms`;
  if (s < 10) return `${(Math.floor(ms / 100) / 10).toFixed(1)} s`;
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} m`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
};
const clock = (at) => {
  const date = new Date(at);
  const time = date.toLocaleTimeString([], { hourCycle: "h23" });
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString()} ${time}`;
};
const place = (one) => one.service === null ? null
  : `${one.service} on ${one.host || "an unknown host"}, process ${one.process}`;

/** Makes the children of a node those of these items, and keeps the ones that are there: focus and selection stay. */
function list(parent, items, idOf, make, draw) {
  const focused = document.activeElement;
  const before = new Map([...parent.children].map((child) => [child.dataset.id, child]));
  const wanted = new Map();
  for (const [index, item] of items.entries()) {
    let id = idOf(item, index);
    // Names that were shortened may look equal.
    while (wanted.has(id)) id += "#";
    wanted.set(id, item);
  }
  for (const [id, child] of before) if (!wanted.has(id)) child.remove();
  let at = parent.firstElementChild;
  for (const [id, item] of wanted) {
    let child = before.get(id);
    if (!child) {
      child = make(item);
      child.dataset.id = id;
    }
    draw(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  // What is moved loses the focus.
  if (focused !== document.activeElement && parent.contains(focused)) focused.focus({ preventScroll: true });
}
function cells(row, labels, values) {
  while (row.children.length < values.length) row.append(element("td"));
  for (const [at, [text, className]] of values.entries()) {
    const cell = row.children[at];
    cell.dataset.label = labels[at];
    put(cell, text, className ?? "");
  }
}
const labelsOf = (table) => [...table.tHead.querySelectorAll("th")].map((heading) => heading.textContent);

// ---- asking

let known = null;
let paused = false;
let timer = null;

class Refusal extends Error {
  constructor(text, kind) {
    super(text);
    this.kind = kind;
  }
}

async function ask(path, options = {}) {
  const signal = AbortSignal.timeout(PATIENCE);
  const answer = await fetch(BASE + path, { signal, cache: "no-store", ...options });
  const kind = answer.headers.get("content-type") ?? "";
  if (!kind.includes("json")) {
    if (answer.status >= 500) throw new Error(`${answer.status}: a proxy has no answer`);
    throw new Refusal(`${answer.status} and no data: you may be signed out. Reload the page to sign in.`);
  }
  const body = await answer.json();
  if (answer.ok) return { ...body, age_ms: Number(answer.headers.get("x-dlock-age-ms")) };
  const isOurs = body.type?.startsWith("urn:dlock:");
  if (answer.status >= 500 && !isOurs) throw new Error(`${answer.status}: a proxy has no answer`);
  const hint = (answer.status === 401 || answer.status === 403) && !isOurs ? " Reload the page to sign in." : "";
  throw new Refusal(`${answer.status}: ${body.detail ?? body.title ?? "refused"}.${hint}`, body.type);
}

/** Has something done. Behind a balancer each request may reach another process, whose token is another one. */
async function act(what, body) {
  for (let tries = 1; ; tries += 1) {
    if (!known.actions) throw new Refusal("Not done: the process that answered last only reads.");
    const headers = { "content-type": "application/json", "x-dlock-console": known.actions.token };
    try {
      return await ask(`api/${what}`, { method: "POST", headers, body: JSON.stringify(body) });
    } catch (error) {
      if (error.kind !== "urn:dlock:problem:console-token" || tries === 5) throw error;
      // The refusal says that nothing was done.
      known = await ask("api/state").catch(() => { throw error; });
    }
  }
}
const failure = (error) => error instanceof Refusal ? error.message : "No answer: it may or may not have been done.";

async function poll() {
  clearTimeout(timer);
  if (!paused && !document.hidden) {
    try {
      const asked = wish();
      const state = await ask(`api/state?${asked}`);
      if (!paused && asked === wish()) {
        known = { ...state, asked };
        live("live", "good");
        draw();
      }
    } catch (error) {
      if (!paused) live(error instanceof Refusal ? error.message : "no answer; asking again", "bad");
    }
    if ($("detail").open) await drawDetail();
  }
  clearTimeout(timer);
  timer = setTimeout(poll, EVERY);
}
/** What changes with each answer is not in the status: it would be read aloud each time. */
function live(text, mood) {
  put($("live"), text, `tag ${mood}`);
  // A large store is looked at less often.
  const age = known?.age_ms > 5000 ? `${lasting(known.age_ms)} old` : "";
  put($("as-of"), mood === "good" || !known ? age : `as of ${clock(known.at_ms)}`);
  document.body.classList.toggle("stale", mood === "bad");
}
function pause() {
  paused = !paused;
  if (paused) live("paused", "warn");
  else poll();
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

// ---- the page

let only = "all";
const isNear = (lock) => lock.holders.some((holder) => holder.near_miss);
const TILES = [
  ["all", "locks", () => true, ""],
  ["held", "held", (lock) => lock.holders.length > 0, ""],
  ["waited", "waited for", (lock) => lock.waiters_in_all > 0, "warn"],
  ["near", "near misses", isNear, "bad"],
  ["unknown", "not explained", (lock) => lock.holders.some((holder) => holder.unknown !== null && !holder.released), "warn"],
];

function draw() {
  const { process } = known;
  put($("process"), `seen from ${process.service} on ${process.host || "an unknown host"}, process ${process.process}`);
  document.title = `Locks · ${shown(process.service)}`;
  drawAlerts();
  drawTiles();
  drawLocks();
  drawTimeline();
  drawClients();
  drawHealth();
}

function drawAlerts() {
  const circles = known.deadlocks.map((circle) => ({
    bad: true,
    title: `Deadlock: ${[...circle, circle[0]].join(" → ")}`,
    text: "Each holder waits for the next lock. Break or revoke one of these holds; then take the locks together "
      + "(LockClient::multi), or in one order everywhere.",
  }));
  const gaps = known.unknown.map((gap) => ({ title: `Not known: ${gap.what}`, text: `${gap.why}. ${gap.remedy}` }));
  const draining = known.process.draining
    ? [{ title: "This process drains", text: "It begins nothing new and is about to end: open the console of another one." }]
    : [];
  list($("alerts"), [...circles, ...draining, ...gaps], (one) => one.title, () => {
    const box = element("div");
    box.append(element("b"), element("p"));
    return box;
  }, (box, one) => {
    box.className = one.bad ? "alert bad" : "alert";
    put(box.children[0], one.title);
    put(box.children[1], one.text);
  });
}

function drawTiles() {
  list($("tiles"), TILES, ([id]) => id, ([id]) => {
    const tile = element("button");
    tile.type = "button";
    tile.append(element("b"), element("span"));
    tile.addEventListener("click", () => {
      only = only === id ? "all" : id;
      wishes();
    });
    return tile;
  }, (tile, [id, name, , mood]) => {
    const count = known.counts[id];
    tile.setAttribute("aria-pressed", String(only === id));
    tile.className = count > 0 ? mood : "";
    put(tile.children[0], count);
    put(tile.children[1], name);
  });
}

/** What the server is asked for: of many locks it shows the most urgent that fit. */
const wish = () => String(new URLSearchParams({ only, find: $("filter").value.trim() }));
let typed = null;
function wishes() {
  draw();
  clearTimeout(typed);
  typed = setTimeout(poll, 300);
}
const textOf = (lock) => [lock.key, lock.kind, ...[...lock.holders, ...lock.waiters].flatMap((one) =>
  [one.id, one.service, one.host, one.location, one.note])].join("\n").toLowerCase();

function drawLocks() {
  const [, , has] = TILES.find(([id]) => id === only);
  const wanted = $("filter").value.trim().toLowerCase();
  // Until the server has answered.
  const fits = (lock) => has(lock) && (!wanted || textOf(lock).includes(wanted));
  const locks = known.asked === wish() ? known.locks : known.locks.filter(fits);
  const labels = labelsOf($("locks"));
  list($("locks").tBodies[0], locks, (lock) => `${lock.key} ${lock.key_bytes}`, (lock) => {
    const row = element("tr");
    const cell = element("td");
    const name = element("button", "link");
    name.type = "button";
    name.addEventListener("click", () => openDetail(row.lock));
    name.addEventListener("focus", () => mark(row));
    cell.append(name, " ", element("span"));
    row.append(cell);
    row.lock = lock;
    return row;
  }, (row, lock) => {
    row.lock = lock;
    const [name, , tag] = row.firstElementChild.childNodes;
    put(name, lock.key);
    drawTag(tag, lock);
    const rest = [null, ...lockCells(lock)];
    while (row.children.length < rest.length) row.append(element("td"));
    for (let at = 1; at < rest.length; at += 1) {
      row.children[at].dataset.label = labels[at];
      put(row.children[at], ...rest[at]);
    }
  });
  drawEmpty(locks.length, wanted);
}
function drawTag(tag, lock) {
  const states = lock.holders.map((holder) => holder.state);
  const bad = states.find((state) => ["killed", "stopped", "silent"].includes(state));
  if (bad) put(tag, `holder ${bad}`, "tag bad");
  else if (isNear(lock)) put(tag, "near miss", "tag bad");
  else if (lock.kind && lock.kind !== "lock") put(tag, lock.kind, "tag");
  else put(tag, "", "");
}
function leaseOf({ lease_left_ms: left, ends_with: what }) {
  if (left !== null) return lasting(left);
  return what ? `ends with ${what}` : "no end";
}
function lockCells(lock) {
  const [first] = lock.holders;
  const longest = lock.waiters[0]?.waited_ms;
  const waiting = [
    [lock.waiters_in_all, lock.waiters_in_all ? "n warn-ink" : "n soft"],
    [longest === undefined ? "–" : lasting(longest), longest === undefined ? "n soft" : "n"],
  ];
  if (!first) return [["nobody that is known", "soft"], ["–", "soft"], ["–", "n soft"], ["–", "n soft"], ...waiting];
  const others = lock.holders_in_all > 1 ? ` and ${lock.holders_in_all - 1} more` : "";
  const who = first.released ? "released, kept for its min_hold" : (place(first) ?? first.id) + others;
  const left = leaseOf(first);
  return [
    [who, first.unknown ? "soft" : ""],
    [first.location ?? "unknown", first.location ? "code" : "soft"],
    [lasting(first.held_ms), first.held_ms === null ? "n soft" : "n"],
    [left, first.near_miss ? "n bad-ink" : "n"],
    ...waiting,
  ];
}
function drawEmpty(count, wanted) {
  $("locks").hidden = count === 0;
  $("locks-empty").hidden = count > 0;
  const blind = known.unknown.length > 0;
  put($("locks-empty"), wanted || only !== "all"
    ? "No lock fits. Clear the filter, or choose “locks” above, to see all."
    : blind ? "No lock is known to be held or waited for; see above for what is not known."
      : "No lock is held, and nobody is known to wait. Locks held for a moment only come and go between two looks.");
  put($("locks-note"), [
    known.locks_left_out ? `${known.locks_left_out} more are not shown: the least urgent ones. The filter finds them.` : "",
    "Waits of other processes are known once they have lasted a second, where presence is on.",
  ].join(" "));
}

function drawEvents(node, events, withKey) {
  list(node, [...events].reverse(), (event) => String(event.number), () => {
    const line = element("li");
    line.append(element("time", "soft"), element("span"), element("span"));
    return line;
  }, (line, event) => {
    put(line.children[0], clock(event.at_ms));
    line.children[0].dateTime = new Date(event.at_ms).toISOString();
    put(line.children[1], event.times > 1 ? `${event.what} ×${event.times}` : event.what, `tag ${event.mood}`);
    put(line.children[2], withKey && event.key !== null ? `${event.key} – ${event.text}` : event.text);
  });
}
function drawTimeline() {
  const { entries, missed } = known.events;
  put($("timeline-note"), (entries.length ? "newest first" : "") + (missed ? `; ${missed} came too fast to be seen` : ""));
  drawEvents($("timeline"), entries, true);
  $("timeline-empty").hidden = entries.length > 0;
  put($("timeline-empty"), "Nothing that went wrong, or took long, since the console began.");
}

function drawClients() {
  const labels = labelsOf($("clients"));
  list($("clients").tBodies[0], known.clients, (client) => client.client, () => element("tr"), (row, client) => {
    const mood = client.state === "alive" ? "" : "bad-ink";
    cells(row, labels, [
      [client.service + (client.is_own ? " (this process)" : "")],
      [`${client.host || "unknown"}${client.address ? ` (${client.address})` : ""}, process ${client.process}`],
      [client.is_own ? "alive" : `${client.state}: ${client.because}`, mood],
      [client.held, "n"], [client.waiting, "n"],
      [client.is_own ? "now" : lasting(client.last_heard_ms), "n"], [client.version, "soft"],
    ]);
  });
  put($("clients-note"), "Clients with presence that hold or wait for something, and this one."
    + (known.clients_left_out ? ` ${known.clients_left_out} more are not shown.` : ""));
}

function facts(parent, pairs) {
  list(parent, pairs.flatMap(([name, text, className]) => [["dt", name], ["dd", text ?? "unknown", className, name]]),
    ([tag, name, , of]) => tag + (of ?? name), ([tag]) => element(tag),
    (node, [, text, className]) => put(node, text, className ?? ""));
}
$("forget").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const { done } = await act("forget", { record: $("record").value.trim(), reason: $("forget-why").value });
    put($("forget-said"), done ? "Forgotten: the next request does the work again." : "There is no such record.");
  } catch (error) {
    put($("forget-said"), failure(error));
  }
});
function drawHealth() {
  $("records").hidden = !known.actions;
  const { process } = known;
  facts($("health"), [
    ["last reply of the store", process.last_reply_ms === null ? "none yet" : `${lasting(process.last_reply_ms)} ago`],
    ["locks held", process.held],
    ["not confirmed when due", process.suspect, process.suspect ? "bad-ink" : ""],
    ["shortest lease", process.least_lease_left_ms === null ? "nothing is held" : `${lasting(process.least_lease_left_ms)} left`],
    ["reconnects", process.reconnects],
    ["client", process.client, "code"],
  ]);
}

// ---- one lock

let detail = null;

function openDetail(lock) {
  detail = { lock, from: document.activeElement };
  put($("detail-title"), lock.key);
  $("detail-body").replaceChildren();
  put($("detail-status"), "");
  drawHolders(lock);
  $("detail").showModal();
  drawDetail();
}
$("close").addEventListener("click", () => $("detail").close());
$("detail").addEventListener("close", () => {
  detail?.from?.focus();
  detail = null;
});
async function drawDetail() {
  const of = detail;
  if (!of.lock.is_lock) {
    put($("detail-status"), `Its name (${of.lock.key_bytes} bytes) is none that a lock of dlock can have: only what the list of locks says is known.`);
    return;
  }
  try {
    const lock = await ask(`api/lock?key=${encodeURIComponent(of.lock.key)}`);
    if (of !== detail) return;
    put($("detail-status"), lock.unknown ? `Only what this process holds and what was known is shown: ${lock.unknown}`
      : lock.holders.length ? "" : "Nobody holds the lock now.");
    drawHolders(lock);
  } catch (error) {
    if (of === detail) put($("detail-status"), error instanceof Refusal ? error.message : "No answer; asking again.");
  }
}
function drawHolders(lock) {
  const body = $("detail-body");
  if (!body.firstChild) body.append(element("div"), element("h3"), element("ol"), element("p", "note"), element("h3"), element("ol", "events"));
  const [holders, title, waiters, note, lately, events] = body.children;
  list(holders, lock.holders, (holder) => holder.id, makeHolder, drawHolder);
  const count = lock.waiters_in_all;
  put(title, count ? `Waiting: ${count}, the longest first` : "Waiting: nobody that is known");
  list(waiters, lock.waiters, (_, at) => String(at), () => element("li"), (line, wait) => {
    const note = wait.note ? ` “${wait.note}”` : "";
    put(line, `${lasting(wait.waited_ms)} – ${place(wait)} – ${wait.location}${note}`);
  });
  const [more, others] = [count - lock.waiters.length, lock.holders_in_all - lock.holders.length];
  put(note, (others > 0 ? `${others} more hold it. ` : "") + (more > 0 ? `${more} more wait. ` : "") + (lock.kind === "fair"
    ? "A fair lock serves them in this order."
    : "Within a process they are served in this order; processes take turns."));
  const of = known.events.entries.filter((event) => event.key === lock.key);
  put(lately, of.length ? "What happened to it lately in this process" : "");
  drawEvents(events, of, false);
}
function makeHolder() {
  const box = element("div", "holder");
  box.append(element("h3"), element("dl", "facts"));
  if (known.actions) box.append(makeActions(box));
  return box;
}

/** What can be done to a hold: each needs a reason, and breaking it a second click. */
function makeActions(box) {
  const form = element("form");
  const reason = element("input");
  reason.required = true;
  reason.maxLength = 200;
  reason.placeholder = "Why (for the holder and the audit log)";
  reason.ariaLabel = "Reason";
  const buttons = element("div", "row");
  const revoke = element("button", "", "Ask the holder to stop");
  const end = element("button", "danger", "Break the hold");
  const sure = element("button", "danger", "Break it: its work goes on until it asks");
  sure.hidden = true;
  const said = element("output");
  buttons.append(revoke, end, sure);
  form.append(reason, buttons, said);
  end.type = "button";
  end.addEventListener("click", () => {
    if (!form.reportValidity()) return;
    end.hidden = true;
    sure.hidden = false;
    sure.focus();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const isBreak = event.submitter === sure;
    const { holder } = box;
    revoke.disabled = sure.disabled = true;
    try {
      const { done } = await act(isBreak ? "break" : "revoke", { key: detail.lock.key, holder: holder.id, reason: reason.value });
      put(said, !done ? "It is not held by this holder any more: nothing was changed."
        : isBreak ? "Broken." : "The holder is asked to stop; the lock stays held until it does.");
    } catch (error) {
      put(said, failure(error));
    }
    revoke.disabled = sure.disabled = end.hidden = false;
    sure.hidden = true;
    if (document.activeElement === document.body) reason.focus();
    poll();
  });
  return form;
}
function drawHolder(box, holder) {
  box.holder = holder;
  if (box.children[2]) box.children[2].hidden = !holder.can_be_broken;
  put(box.children[0], `${holder.released ? "Released" : "Held"} by ${place(holder) ?? "a client that is not known"}`);
  const waits = holder.waits_for;
  facts(box.children[1], [
    ["state", `${holder.state}: ${holder.because}`, ["alive", "released", "unknown"].includes(holder.state) ? "" : "bad-ink"],
    ...(holder.unknown ? [["not known", holder.unknown, holder.released ? "" : "warn-ink"]] : []),
    ["kind", holder.kind],
    ["held for", lasting(holder.held_ms)],
    ["lease left", leaseOf(holder) + (holder.near_miss ? ": it was not renewed when that was due" : ""), holder.near_miss ? "bad-ink" : ""],
    ["acquired at", holder.location, "code"],
    ...(holder.reentered?.length ? [["entered again at", holder.reentered.join(", "), "code"]] : []),
    ["note", holder.note ?? (holder.unknown ? "unknown" : "none")],
    ["fencing token", holder.token],
    ["waits for", waits ? `${waits.key} since ${lasting(waits.waited_ms)}, at ${waits.location}` : "no lock that is known"],
    ["address", holder.address],
    ["id", holder.id, "code"],
  ]);
}

// ---- keyboard and theme

const rows = () => [...$("locks").tBodies[0].rows];
function mark(row) {
  for (const one of rows()) one.classList.toggle("current", one === row);
}
function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("current"));
  const next = all[at < 0 ? 0 : Math.min(Math.max(at + step, 0), all.length - 1)];
  next.querySelector("button").focus();
  next.scrollIntoView({ block: "nearest" });
}
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input:not([type=checkbox]), textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || $("detail").open) return;
  if (typing) {
    if (event.target !== $("filter")) return;
    if (event.key === "Escape") { $("filter").value = ""; if (known) wishes(); event.target.blur(); }
    // Not to be pressed on the lock as well.
    if (event.key === "Enter") { event.preventDefault(); move(0); }
    return;
  }
  const act = { "/": () => $("filter").focus(), j: () => move(1), k: () => move(-1), t: turnTheme, p: pause }[event.key];
  if (act && $("keys").checked) {
    event.preventDefault();
    act();
  }
});
const KEYS_KEPT_AS = "dlock-console-keys";
try { $("keys").checked = localStorage.getItem(KEYS_KEPT_AS) !== "off"; } catch { /* they are on */ }
$("keys").addEventListener("change", () => {
  try { localStorage.setItem(KEYS_KEPT_AS, $("keys").checked ? "on" : "off"); } catch { /* it lasts until the page is left */ }
});
$("filter").addEventListener("input", () => { if (known) wishes(); });

const THEMES = ["auto", "light", "dark"];
const KEPT_AS = "dlock-console-theme";
let theme = "auto";
function setTheme(next) {
  theme = THEMES.includes(next) ? next : "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  put($("theme"), `Theme: ${theme}`);
}
function turnTheme() {
  setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  try { localStorage.setItem(KEPT_AS, theme); } catch { /* it lasts until the page is left */ }
}
$("theme").addEventListener("click", turnTheme);
try { setTheme(localStorage.getItem(KEPT_AS)); } catch { setTheme("auto"); }
poll();
