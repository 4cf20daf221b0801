// The page: asks once a second, keeps two minutes of it, and says what it means.
"use strict";

const EVERY_MS = 1000;
const PATIENCE_MS = 40000; // the server itself waits 30 s for a long step
const SPAN_S = 120;
const WINDOW_S = 4; // live figures are of the last few seconds
const OLD_STEPS = 512; // as many as the recent rounds: what has not run since is not of now
const KEY = "slipstream-api-key";

const CAUSES = {
  does_not_pay: "A round would cost more than its tokens",
  nothing_offered: "The drafter had nothing to offer",
  remeasured: "A classic step was timed again",
  unmeasured: "A time was not known yet",
  budget: "The loss budget was spent",
  neighbour_budget: "Others in the batch would have paid",
  resting: "Lookups rested until their debt was paid",
  off: "Drafting was off",
  failed: "The drafter had failed",
  other: "Other",
};

const $ = (id) => document.getElementById(id);
let snapshots = []; // {at, totals}, oldest first, of one life of the server
let current = null;
let seenAt = 0;
let refused = false;

function text(id, value) {
  const place = $(id);
  if (place.textContent !== value) place.textContent = value;
}

// What was done between two snapshots: tokens a busy second, and what classic would have made.
function rates(from, to) {
  const tokens = to.totals.generation_tokens - from.totals.generation_tokens;
  const busy = to.totals.step_s - from.totals.step_s;
  if (!(tokens > 0 && busy > 0)) return { live: null, classic: null };
  const decode = to.totals.decode_s - from.totals.decode_s;
  const worth = to.totals.decode_classic_s - from.totals.decode_classic_s;
  const classic = decode > 0 ? tokens / (busy - decode + worth) : null;
  return { live: tokens / busy, classic };
}

function remember(said, now) {
  const last = snapshots[snapshots.length - 1];
  // Counters that fell are another process's.
  if (last && last.totals.steps > said.totals.steps) snapshots = [];
  snapshots.push({ at: now, totals: said.totals });
  while (snapshots[0].at < now - SPAN_S - WINDOW_S) snapshots.shift();
}

// The snapshot that begins the window which ends at an index.
function windowStart(index) {
  let start = index;
  while (start > 0 && snapshots[index].at - snapshots[start].at < WINDOW_S) start -= 1;
  return snapshots[start];
}

// Drafted tokens of the step that would come next; null where nothing was decided.
function chosenRows(said) {
  if (!said.widths.length || said.verdict === "unmeasured") return null;
  return said.widths.reduce((sum, k) => sum + k, 0);
}

function widthWords(said) {
  if (chosenRows(said) === null) return "–";
  if (said.batch === 1) return `k = ${said.widths[0]}`;
  return said.batch <= 4 ? said.widths.join(" · ") : `${chosenRows(said)} for ${said.batch}`;
}

function sentence(reason) {
  const rest = reason.replace(/^(enable|decline|fixed|off|unmeasured): /, "");
  return rest.charAt(0).toUpperCase() + rest.slice(1) + (/[.!?]$/.test(rest) ? "" : ".");
}

function headline(said) {
  const idle = said.requests.running === 0;
  if (said.verdict === "off") return "Speculation is off";
  if (said.totals.steps === 0) return "Nothing has run yet";
  if (said.verdict === "unmeasured") return idle ? "Not measured yet" : "Measuring";
  if (said.verdict === "fixed") return `Drafting ${said.mode.split(":")[1]}, as asked`;
  if (said.verdict === "enable") return idle ? "Idle, ready to speculate" : "Speculating";
  return idle ? "Idle, would not speculate" : "Not speculating";
}

function drawVerdict(said) {
  text("verdict", headline(said));
  const first = said.totals.steps === 0 && said.verdict !== "off";
  text("reason", first
    ? "The first request takes three classic steps, which are timed before anything drafts."
    : sentence(said.reason));
  const rounds = said.recent.rounds;
  const lately = rounds ? 1 - said.recent.k_histogram[0] / rounds : 0;
  text("lately", rounds ? `${percent(lately)} of the last ${rounds} rounds drafted.` : "");
  text("width", widthWords(said));
  text("predicted", said.predicted_speedup === null ? "–" : `${short(said.predicted_speedup)}×`);
  text("context", said.context_len ? String(said.context_len) : "–");
}

function drawSpeed() {
  const newest = snapshots[snapshots.length - 1];
  const points = snapshots.map((snapshot, index) => ({
    ago: newest.at - snapshot.at,
    ...rates(windowStart(index), snapshot),
  })).filter((point) => point.ago <= SPAN_S);
  speedChart($("speed"), points, SPAN_S);
  const now = points[points.length - 1];
  text("live", short(now.live));
  text("classic", short(now.classic));
  text("gain", now.live && now.classic ? `${short(now.live / now.classic)}×` : "–");
}

function drawCosts(said) {
  const chosen = chosenRows(said);
  if (said.costs.length) costChart($("cost"), said.costs, chosen, OLD_STEPS);
  else empty($("cost"), "Nothing drafts here");
  const entry = said.costs.find((each) => each.drafted === chosen);
  const whose = said.batch > 1 ? `${said.batch} requests share a step. ` : "";
  text("cost-note", entry ? `${whose}${costTitle(entry)}.` : whose);
  text("recent-count", String(said.recent.rounds));
  recentChart($("recent"), said.recent.k_histogram, said.ceiling, said.recent.rounds);
}

function drawAcceptance(said) {
  acceptanceChart($("acceptance"), said.acceptance.slice(0, said.ceiling));
  let drafted = 0;
  let accepted = 0;
  for (const each of said.acceptance) { drafted += each.drafted; accepted += each.accepted; }
  text("acceptance-note", drafted
    ? `${accepted} of ${drafted} drafted tokens were accepted, ${percent(accepted / drafted)}.`
    : "Nothing was drafted yet.");
  const rows = Object.entries(said.sources).map(([name, each]) => [
    name,
    each.drafted ? `${percent(each.accepted / each.drafted)} of ${each.drafted} accepted`
      : name.includes("+") ? "asked together" : "none drafted",
    `in ${short(each.draft_ms / 1000)} s`,
  ]);
  table("sources", rows.length ? rows : [["None yet", ""]]);
}

function drawBudget(said) {
  const budget = said.budget;
  const capacity = budget ? budget.capacity_ms : null;
  const share = capacity ? budget.debt_ms / capacity : 0;
  text("debt", budget ? `${short(budget.debt_ms)} ms` : "–");
  text("debt-of", capacity ? `owed of ${short(capacity)} ms` : budget ? "owed" : "nothing drafts");
  meter("debt-meter", share);
  const decode = said.totals.decode_s;
  const won = said.totals.decode_classic_s - decode;
  const many = budget && budget.capacity_batch > 1 ? `${budget.capacity_batch} requests` : "";
  text("budget-title", many ? `Loss budget of ${many}` : "Loss budget");
  if (share > 1) text("won", `More than ${many || "a request"} may owe: nothing drafts until it is paid.`);
  else if (!decode) text("won", "Nothing to compare with classic decoding yet.");
  else {
    const what = won >= 0 ? `${short(won)} s won` : `${short(-won)} s lost`;
    text("won", `Since the start ${what} against classic decoding, ` +
      `${short(said.totals.decode_classic_s / decode)}×.`);
  }
}

function drawRequests(said) {
  const { running, waiting, finished, cancelled, dropped } = said.requests;
  text("running", String(running));
  text("waiting", String(waiting));
  text("finished", String(finished));
  const { kv_pages_used: used, kv_pages: all } = said.totals;
  meter("pages-meter", all ? used / all : 0);
  const ended = [[cancelled, "cancelled"], [dropped, "dropped by a failed step"]]
    .filter(([count]) => count).map(([count, how]) => `, ${count} ${how}`).join("");
  text("pages", `${used} of ${all} KV pages in use${ended}.`);
}

function drawCauses(said) {
  const total = Object.values(said.undrafted).reduce((sum, count) => sum + count, 0);
  const rows = Object.entries(said.undrafted).filter(([, count]) => count)
    .sort((a, b) => b[1] - a[1]).slice(0, 5)
    .map(([cause, count]) => [CAUSES[cause] ?? cause, percent(count / total)]);
  table("causes", rows.length ? rows : [["None", ""]]);
}

function table(id, rows) {
  $(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach((value, index) => {
      const cell = document.createElement(index ? "td" : "th");
      if (!index) cell.scope = "row";
      cell.textContent = value;
      row.append(cell);
    });
    return row;
  }));
}

function meter(id, share) {
  const place = $(id);
  const shown = Math.min(Math.max(share, 0), 1);
  place.setAttribute("aria-valuenow", String(Math.round(100 * shown)));
  place.dataset.full = String(share >= 0.9);
  place.firstElementChild.style.width = `${100 * shown}%`;
}

function draw(said) {
  drawVerdict(said);
  drawSpeed();
  drawCosts(said);
  drawAcceptance(said);
  drawBudget(said);
  drawRequests(said);
  drawCauses(said);
  text("profile", `Profile: ${said.profile}`);
  $("main").setAttribute("aria-busy", "false");
}

function state(name, words) {
  const link = $("link");
  if (link.dataset.state !== name) link.dataset.state = name;
  const place = link.lastElementChild;
  if (place.textContent !== words) place.textContent = words;
  $("main").dataset.stale = String(name === "gone");
}

function ago(ms) {
  const seconds = Math.round(ms / 1000);
  return seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
}

function askForKey() {
  text("ask-text", refused ? "The server refused this key. It is kept until the tab is closed."
    : "This server asks for a key. It is kept until the tab is closed.");
  if (!$("ask").open) $("ask").showModal();
}

async function get(path) {
  const key = sessionStorage.getItem(KEY);
  const giveUp = new AbortController();
  const timer = setTimeout(() => giveUp.abort(), PATIENCE_MS);
  try {
    return await fetch(path, {
      headers: key ? { Authorization: `Bearer ${key}` } : {},
      signal: giveUp.signal, cache: "no-store",
    });
  } finally {
    clearTimeout(timer);
  }
}

async function nameModel() {
  try {
    const reply = await get("v1/models");
    if (reply.ok) text("model", (await reply.json()).data.map((each) => each.id).join(", "));
  } catch { /* a title without a name will do */ }
}

async function problem(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answers ${reply.status}`;
  }
}

async function poll() {
  try {
    const reply = await get("v1/speculation");
    if (reply.status === 401 || reply.status === 403) {
      refused = sessionStorage.getItem(KEY) !== null;
      sessionStorage.removeItem(KEY);
      state("wait", "Waiting for a key");
      askForKey();
      return; // the form goes on
    }
    if (!reply.ok) throw new Error(await problem(reply));
    const said = await reply.json();
    if (said.schema !== 1) throw new Error("the server speaks another version; reload the page");
    const first = current === null;
    current = said;
    seenAt = Date.now();
    remember(said, performance.now() / 1000);
    draw(said);
    const busy = said.requests.running + said.requests.waiting > 0;
    state(busy ? "live" : "idle", busy ? "Live" : "Idle");
    if (first) nameModel();
  } catch (error) {
    const since = seenAt ? `, last seen ${ago(Date.now() - seenAt)} ago` : "";
    const silent = error instanceof TypeError || error.name === "AbortError";
    state("gone", `${silent ? "The server does not answer" : error.message}${since}`);
  }
  setTimeout(() => (document.hidden ? whenSeen() : poll()), EVERY_MS);
}

// A page that nobody sees asks for nothing.
function whenSeen() {
  document.addEventListener("visibilitychange", poll, { once: true });
}

$("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  $("ask").close();
  poll();
});
$("ask").addEventListener("cancel", (event) => event.preventDefault());

let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  if (current) draw(current);
}).observe(document.body);

for (const box of document.querySelectorAll(".chart")) {
  box.style.height = `${box.dataset.height}px`;
  empty(box, "");
}
poll();
