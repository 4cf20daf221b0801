// Charts: plain functions from numbers to SVG. A chart's height is fixed before it has any data, and
// it is drawn in the pixels that it has, so that text keeps its size and nothing around it moves.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const EDGE = { left: 38, right: 10, top: 14, bottom: 20 };

function node(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Three significant digits, without the noise of more: 0.42, 3.17, 21.6, 148.
function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

// A number that stands at an axis: as short, without zeros that say nothing.
function plain(value) {
  return String(Number(value.toPrecision(3)));
}

function percent(share) {
  if (share === null) return "–";
  if (share > 0 && share < 0.01) return "<1\u00a0%";
  return `${Math.round(100 * share)}\u00a0%`;
}

// The least of 1, 2, 2.5, 5 times a power of ten that is not below a value.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999);
}

// An empty drawing in a chart's box, with the sentence that says the same to who cannot see it.
function canvas(box, label, edge = EDGE) {
  const width = Math.max(box.clientWidth, 160);
  const height = Number(box.dataset.height);
  const drawing = node("svg", {
    viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label,
  });
  const inner = { left: edge.left, top: edge.top, width: width - edge.left - edge.right,
    height: height - edge.top - edge.bottom };
  return { drawing, inner, bottom: inner.top + inner.height, right: inner.left + inner.width };
}

function show(box, drawing) {
  box.replaceChildren(drawing);
}

function grid(at, top, format) {
  const lines = [0, 0.5, 1].map((share) => {
    const y = at.bottom - share * at.inner.height;
    return [
      node("line", { class: "grid", x1: at.inner.left, x2: at.right, y1: y, y2: y }),
      node("text", { x: at.inner.left - 6, y: y + 4, "text-anchor": "end" }, format(share * top)),
    ];
  });
  at.drawing.append(...lines.flat());
}

function empty(box, text) {
  const at = canvas(box, text);
  grid(at, 1, () => "");
  const middle = at.inner.top + at.inner.height / 2 - 8;
  at.drawing.append(node("text", {
    class: "empty", x: at.inner.left + at.inner.width / 2, y: middle, "text-anchor": "middle",
  }, text));
  show(box, at.drawing);
}

// The points of a line that breaks where a value is missing, as an SVG path.
function path(points) {
  let text = "";
  let pen = "M";
  for (const point of points) {
    if (point === null) { pen = "M"; continue; }
    text += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = "L";
  }
  return text;
}

// samples: [{ago, live, classic}], ago in seconds, newest last; null where nothing ran.
function speedChart(box, samples, span) {
  const seen = samples.filter((sample) => sample.live !== null);
  if (!seen.length) return empty(box, "Nothing has run in the last two minutes");
  const top = nice(1.05 * Math.max(...seen.flatMap((each) => [each.live, each.classic ?? 0])));
  const last = seen[seen.length - 1];
  const at = canvas(box, `Tokens a second over the last two minutes: now ${short(last.live)}, ` +
    `classic decoding would make ${short(last.classic)}.`);
  grid(at, top, plain);
  const x = (sample) => at.right - (sample.ago / span) * at.inner.width;
  const y = (value) => at.bottom - (value / top) * at.inner.height;
  const line = (name) => samples.map((s) => (s[name] === null ? null : [x(s), y(s[name])]));
  const both = samples.filter((each) => each.live !== null && each.classic !== null);
  if (both.length > 1) {
    const area = [...both.map((s) => [x(s), y(s.live)]),
      ...both.reverse().map((s) => [x(s), y(s.classic)])];
    at.drawing.append(node("path", { class: "won", d: `${path(area)}Z` }));
  }
  at.drawing.append(
    node("path", { class: "classic", d: path(line("classic")) }),
    node("path", { class: "live", d: path(line("live")) }),
    node("circle", { class: "dot", cx: x(last), cy: y(last.live), r: 4 }),
    node("text", { x: at.inner.left, y: at.bottom + 16 }, "2 min ago"),
    node("text", { x: at.right, y: at.bottom + 16, "text-anchor": "end" }, "now"),
  );
  show(box, at.drawing);
}

// Columns side by side, one per entry; each says what it is when it is pointed at.
function columns(at, count, draw) {
  const step = at.inner.width / count;
  for (let index = 0; index < count; index += 1) {
    const left = at.inner.left + index * step;
    const { parts, title } = draw(index, left, step);
    at.drawing.append(node("g", { class: "col" }, node("title", {}, title),
      node("rect", { class: "hit", x: left, y: at.inner.top, width: step, height: at.inner.height }),
      ...parts));
  }
}

// Every how many columns have a label, so that labels keep their distance on a telephone.
function labelStride(at, count) {
  return Math.ceil(21 / (at.inner.width / count));
}

function columnLabel(at, left, step, text, strong = false) {
  return node("text", { x: left + step / 2, y: at.bottom + 15, "text-anchor": "middle",
    ...(strong ? { class: "strong" } : {}) }, text);
}

function column(at, left, step, share, name) {
  const height = Math.max(share * at.inner.height, share > 0 ? 1.5 : 0);
  const gap = Math.min(6, step * 0.16);
  return node("rect", { class: name, x: left + gap, y: at.bottom - height, rx: 2,
    width: Math.max(step - 2 * gap, 1), height });
}

// costs: as v1/speculation has them; chosen: the drafted tokens that are marked, null for none; old:
// steps after which a time is shown as one of the past.
function costChart(box, costs, chosen, old) {
  const known = costs.filter((entry) => entry.round_ms !== null);
  if (!known.length) return empty(box, "No round was measured yet");
  const pick = costs.find((entry) => entry.drafted === chosen);
  const worths = known.map((entry) => entry.classic_ms ?? 0);
  const top = nice(1.08 * Math.max(...known.map((entry) => entry.round_ms), ...worths));
  const at = canvas(box, pick && pick.round_ms !== null
    ? `Milliseconds of a round by drafted tokens; ${chosen} is chosen: ${costTitle(pick)}`
    : "Milliseconds of a round by drafted tokens.");
  grid(at, top, plain);
  const every = labelStride(at, costs.length);
  const place = costs.indexOf(pick);
  columns(at, costs.length, (index, left, step) => {
    const entry = costs[index];
    const strong = index === place;
    const near = place >= 0 && !strong && Math.abs(index - place) < every;
    const label = strong || (index % every === 0 && !near) ? String(entry.drafted) : "";
    const parts = [columnLabel(at, left, step, label, strong)];
    if (entry.round_ms !== null) {
      const isOld = entry.age_steps === null || entry.age_steps > old;
      const name = strong ? "bar-live" : isOld ? "bar-old" : "bar-soft";
      parts.push(column(at, left, step, entry.round_ms / top, name));
    }
    if (entry.classic_ms !== null && entry.classic_ms <= top) {
      const y = at.bottom - (entry.classic_ms / top) * at.inner.height;
      parts.push(node("line", { class: "worth", x1: left + 1, x2: left + step - 1, y1: y, y2: y }));
    }
    return { parts, title: `${costTitle(entry)} (${ageWords(entry)})` };
  });
  show(box, at.drawing);
}

function ageWords(entry) {
  if (entry.round_ms === null) return "never run";
  if (entry.age_steps === null) return "timed before the start";
  return entry.age_steps === 0 ? "run in the last step" : `last run ${entry.age_steps} steps ago`;
}

function costTitle(entry) {
  if (entry.drafted === 0) {
    return entry.round_ms === null ? "The classic step was not timed yet"
      : `The classic step takes ${short(entry.round_ms)} ms`;
  }
  if (entry.round_ms === null) return `${entry.drafted} drafted: not measured`;
  const round = `${entry.drafted} drafted: ${short(entry.round_ms)} ms ` +
    `for ${short(entry.tokens)} tokens`;
  if (entry.classic_ms === null) return round;
  return `${round}; classic takes ${short(entry.classic_ms)} ms, so ${short(entry.speedup)}×`;
}

function recentChart(box, histogram, ceiling, total) {
  const shown = histogram.slice(0, ceiling + 1);
  const at = canvas(box, total
    ? `Of the last ${total} rounds: ` + shown.map((n, k) => [n, k]).filter(([n]) => n)
      .map(([n, k]) => `${percent(n / total)} drafted ${k}`).join(", ")
    : "No rounds yet", { ...EDGE, top: 16 });
  at.drawing.append(node("line", {
    class: "grid", x1: at.inner.left, x2: at.right, y1: at.bottom, y2: at.bottom }));
  const most = Math.max(...shown, 1);
  const every = labelStride(at, shown.length);
  columns(at, shown.length, (k, left, step) => {
    const share = total ? shown[k] / total : 0;
    const parts = [columnLabel(at, left, step, k % every === 0 ? String(k) : "")];
    if (shown[k]) {
      parts.push(column(at, left, step, shown[k] / most, "bar-soft"));
      const y = at.bottom - (shown[k] / most) * at.inner.height - 4;
      const text = share < 0.01 ? "<1" : String(Math.round(100 * share));
      parts.push(node("text", { x: left + step / 2, y, "text-anchor": "middle" }, text));
    }
    return { parts, title: `${shown[k]} of the last ${total} rounds drafted ${k}` };
  });
  show(box, at.drawing);
}

// positions: as v1/speculation has them, within the ceiling.
function acceptanceChart(box, positions) {
  const counted = positions.map((each) => (each.drafted ? each.accepted / each.drafted : null));
  if (!positions.length) return empty(box, "Nothing drafts here");
  const first = positions[0];
  const at = canvas(box, `Share of drafts that are accepted, by place: the first is believed to be ` +
    `accepted in ${percent(first.survival)} of rounds` +
    (first.drafted ? `, and was in ${percent(counted[0])} so far.` : "."));
  grid(at, 1, percent);
  const points = [];
  const every = labelStride(at, positions.length);
  columns(at, positions.length, (index, left, step) => {
    const each = positions[index];
    const parts = [columnLabel(at, left, step, index % every === 0 ? String(each.position) : "")];
    if (counted[index] !== null) parts.push(column(at, left, step, counted[index], "bar-soft"));
    if (each.survival !== null) {
      points.push([left + step / 2, at.bottom - each.survival * at.inner.height]);
    }
    const title = `Draft ${each.position}: ${each.accepted} of ${each.drafted} accepted` +
      (each.survival === null ? "" : `; believed ${percent(each.survival)}`);
    return { parts, title };
  });
  at.drawing.append(node("path", { class: "live", d: path(points), "pointer-events": "none" }));
  for (const [cx, cy] of points) {
    at.drawing.append(node("circle", { class: "dot", cx, cy, r: 3.5, "pointer-events": "none" }));
  }
  show(box, at.drawing);
}
