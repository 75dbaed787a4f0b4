// The live page: one event stream in, text and charts out. Everything shown comes from /v1/events.

import { Chart } from "./charts.js";
import { openLetters } from "./letters.js";
import { decimals, fit, heldOut, overRows } from "./scales.js";

const MEAN_STEPS = 20;
const LIVE = [["queued", "var(--slate)"], ["running", "var(--blue)"], ["completed", "var(--teal)"], ["batched", "var(--violet)"]];
const ENDED = ["trained", "delivered", "rejected", "cancelled", "expired", "dead_lettered"];
// A step's tasks are the trainer's until a checkpoint holds what it learned from them.
const WORDS = { batched: "in training", trained: "trained, saved" };
const TIMES = [["time/train", "Train", "var(--teal)"], ["time/wait", "Wait", "var(--slate)"], ["time/publish", "Publish", "var(--amber)"]];
const SPARKS = [["train/loss", "Loss"], ["train/grad_norm", "Grad norm"], ["policy/entropy", "Entropy"]];
// What a recipe records has a name of its own, such as my/number.
const OURS = /^(reward|group|rollout|staleness|train|policy|reference|mismatch|critic|time|eval)\//;
const MOST_OWN = 12;
const SERVER_TONE = { serving: "good", syncing: "busy", joining: "busy", draining: "warn", quarantined: "bad" };
const TRAINER = {
  starting: ["busy", "Starting"], waiting: ["busy", "Waiting for a batch"], training: ["good", "Training"],
  saving: ["busy", "Saving"], finished: ["good", "Finished"], failed: ["bad", "Failed"], unspecified: ["idle", "Unknown"],
};

const state = { rows: [], samples: [], status: null };
const $ = (id) => document.getElementById(id);
const charts = Object.fromEntries(
  ["reward", "queue", "samples", "tokens", "staleness", "time"].map((name) => [name, new Chart($(`chart-${name}`))]),
);

// ---------------------------------------------------------------- words for numbers

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 2) {
  if (!isNumber(value)) return "–";
  if (value !== 0 && Math.abs(value) < 10 ** -digits / 2) return value.toExponential(1).replace("-", "−");
  return value.toFixed(digits).replace("-", "−");
}

function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${trim((value / 1e3).toPrecision(3))}k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  return trim(value.toPrecision(size >= 10 ? 3 : 2));
}

const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
}

function span(value) {
  const total = Math.max(0, Math.round(value));
  const [h, m, s] = [Math.floor(total / 3600), Math.floor((total % 3600) / 60), total % 60];
  if (h) return `${h} h ${m} min`;
  if (m) return `${m} min ${String(s).padStart(2, "0")} s`;
  return `${s} s`;
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : NaN);
const column = (rows, key) => rows.filter((r) => isNumber(r[key])).map((r) => [r.step, r[key]]);

function movingMean(points, size) {
  const result = [];
  let sum = 0;
  points.forEach(([x, y], i) => {
    sum += y - (i >= size ? points[i - size][1] : 0);
    result.push([x, sum / Math.min(i + 1, size)]);
  });
  return result;
}

function text(id, value) {
  const element = $(id);
  if (element.textContent !== value) element.textContent = value;
}

// Parts are strings, or [tag, class, string].
function rich(id, ...parts) {
  $(id).replaceChildren(...parts.map((part) => {
    if (!Array.isArray(part)) return part;
    const [tag, name, content] = part;
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.textContent = content;
    return element;
  }));
}

function pill(element, tone, label, title = "") {
  element.dataset.tone = tone;
  element.title = title;
  element.querySelector("span").textContent = label;
}

function legend(id, items) {
  $(id).replaceChildren(...items.map(({ label, color, value, block, faint }) => {
    const item = document.createElement("li");
    const key = document.createElement("span");
    key.className = `key${block ? " block" : ""}${faint ? " faint" : ""}`;
    key.style.setProperty("--key", color);
    item.append(key, label);
    if (value !== undefined) {
      const bold = document.createElement("b");
      bold.textContent = value;
      item.append(bold);
    }
    return item;
  }));
}

// ---------------------------------------------------------------- header

function drawHeader({ run, trainer, sources, ledger, findings, eta_s: eta }) {
  text("experiment", run.experiment);
  text("trial", run.trial);
  const gone = trainer && !sources.trainer.ok && !["finished", "failed"].includes(trainer.state);
  if (!trainer) pill($("trainer"), "idle", "No trainer", sources.trainer.error);
  else if (gone) pill($("trainer"), "warn", "Trainer unreachable", sources.trainer.error);
  else pill($("trainer"), ...(TRAINER[trainer.state] ?? TRAINER.unspecified), trainer.detail);

  const total = trainer?.total_steps ?? 0;
  const step = trainer?.step ?? 0;
  if (trainer) rich("steps", ["b", "", short(step)], ` of ${short(total)} steps`);
  else text("steps", "");
  text("eta", isNumber(eta) && !gone && step < total ? `about ${span(eta)} left` : "");
  const share = total ? Math.min(100, (100 * step) / total) : 0;
  const bar = $("progress");
  bar.firstElementChild.style.width = `${share}%`;
  bar.setAttribute("aria-valuenow", step);
  bar.setAttribute("aria-valuemax", total);
  document.title = trainer ? `${step}/${total} · ${run.experiment} · AReaL` : `${run.experiment} · AReaL`;
  drawBanner(sources, trainer, gone, ledger, findings);
}

function drawBanner(sources, trainer, gone, ledger, findings) {
  const banner = $("banner");
  const lines = [];
  let tone = "info";
  for (const [name, words] of [["ledger", "The task ledger"], ["servers", "Weight sync"]]) {
    const source = sources[name];
    if (source.configured && !source.ok) {
      tone = "bad";
      lines.push([`${words} has not answered since ${clock(source.since)}. `, source.error || "Connecting."]);
    }
  }
  if (trainer?.state === "failed") {
    tone = "bad";
    lines.push(["The trainer has failed. ", trainer.detail || "See its log."]);
  } else if (gone) {
    tone = tone === "bad" ? tone : "warn";
    lines.push([`The trainer has not answered since ${clock(sources.trainer.since)}. `, "It resumes from its last checkpoint; no finished task is lost."]);
  }
  // Until a trainer has registered, the ledger still tells the failures of the run before.
  const current = ledger && (!trainer || trainer.incarnation === ledger.incarnation);
  if (current && ledger.failures.length) {
    const [worst] = ledger.failures;
    tone = tone === "bad" ? tone : "warn";
    if (ledger.stopped) {
      tone = "bad";
      lines.push(["The run was stopped: ", ledger.stopped]);
    }
    lines.push([`The workflow or reward fails (${short(worst.attempts)} attempt${worst.attempts === 1 ? "" : "s"}). `,
      `Task ${worst.task_id}: ${worst.detail} (all failed tasks: areal dead-letters list)`]);
  }
  for (const { seen, advice } of findings) {
    tone = tone === "bad" ? tone : "warn";
    lines.push(["The run may not learn: ", `${seen}; ${advice}`]);
  }
  if (!trainer) {
    lines.push(["No trainer is attached. ", "Tasks with purpose “serve” run at the current policy version; training appears here once a trainer starts."]);
  }
  const key = JSON.stringify([tone, lines]);
  if (banner.dataset.key === key) return;
  banner.dataset.key = key;
  banner.dataset.tone = tone;
  banner.hidden = !lines.length;
  banner.replaceChildren(...lines.map(([strong, rest]) => {
    const line = document.createElement("div");
    const bold = document.createElement("b");
    bold.textContent = strong;
    line.append(bold, rest);
    return line;
  }));
}

// ---------------------------------------------------------------- tiles

function drawTiles({ ledger, versions, rates, run }) {
  const { rows } = state;
  const rewards = column(rows, "reward/mean").map((p) => p[1]);
  if (rewards.length) {
    const last = mean(rewards.slice(-MEAN_STEPS));
    const gain = last - mean(rewards.slice(0, MEAN_STEPS));
    text("kpi-reward", number(last, 3));
    if (rewards.length > MEAN_STEPS) {
      const sign = gain >= 0 ? "+" : "−";
      rich("kpi-reward-note", ["span", gain >= 0 ? "up" : "down", `${sign}${Math.abs(gain).toFixed(3)}`], " since the first 20");
    } else text("kpi-reward-note", `mean of ${rewards.length} step${rewards.length > 1 ? "s" : ""}`);
  } else {
    text("kpi-reward", "–");
    text("kpi-reward-note", "no steps yet");
  }
  text("kpi-samples", short(rates.samples_per_s));
  text("kpi-tokens", short(rates.tokens_per_s));
  text("kpi-samples-note", ledger ? `${short(ledger.trajectories)} in total` : "ledger unreachable");
  text("kpi-tokens-note", ledger ? `${short(ledger.generated_tokens)} in total` : "ledger unreachable");

  const bound = ledger?.max_head_offpolicyness || run.max_head_offpolicyness;
  if (ledger) {
    text("kpi-staleness", number(ledger.staleness_mean));
    text("kpi-staleness-note", `max ${ledger.staleness_max}, bound ${bound}`);
  }
  if (versions) {
    text("kpi-version", versions.current_version < 0 ? "–" : `v${versions.current_version}`);
    text("kpi-version-note", `on ${versions.confirmed_servers} of ${versions.servers} servers`);
  }
  const recent = rows.slice(-MEAN_STEPS);
  const took = mean(recent.map((r) => r["time/step"]).filter(isNumber));
  const waited = mean(recent.map((r) => r["time/wait"]).filter(isNumber));
  text("kpi-step", seconds(took));
  text("kpi-step-note", isNumber(waited / took) ? `${Math.round((100 * waited) / took)}% waiting for a batch` : "no steps yet");
}

// ---------------------------------------------------------------- charts over steps

const HELD_OUT = ["var(--amber)", "var(--violet)", "var(--slate)"];
const stepAxis = { whole: true, format: (x) => String(Math.round(x)), head: (x) => `Step ${Math.round(x)}` };

function drawSteps({ trainer, run, ledger }) {
  const { rows } = state;
  const empty = trainer ? "The first step is in progress" : "No training steps yet";
  const raw = column(rows, "reward/mean");
  const smooth = movingMean(raw, MEAN_STEPS);
  const measured = Object.entries(heldOut(trainer?.evaluations ?? [])).map(([name, points], i) => (
    { label: (name === "heldout" ? "held out" : name) + overRows(trainer.evaluations, name), color: HELD_OUT[i % HELD_OUT.length], points, kind: "marks", width: 1.25, format: (y) => number(y, 3) }));
  const [low, high] = fit([...raw, ...measured.flatMap((m) => m.points)].map((p) => p[1]));
  charts.reward.update({
    empty, x: stepAxis,
    label: `Mean reward over ${raw.length} train steps`,
    y: { min: low, max: high, ticks: 4, format: (y, every) => number(y, Math.max(2, decimals(every))) },
    series: [
      { label: "Step", color: "var(--teal)", points: raw, width: 1.25, opacity: 0.38, format: (y) => number(y, 3) },
      { label: "Mean of 20", color: "var(--teal)", points: smooth, width: 2.5, kind: "area", end: true, format: (y) => number(y, 3) },
      ...measured,
    ],
  });
  legend("legend-reward", raw.length ? [
    { label: "each step", color: "var(--teal)", faint: true },
    { label: "mean of 20", color: "var(--teal)" },
    ...measured.map((m) => ({ label: m.label, color: m.color, block: true, value: number(m.points[m.points.length - 1][1], 3) })),
  ] : []);

  const bound = ledger?.max_head_offpolicyness || run.max_head_offpolicyness;
  const last = rows[rows.length - 1] ?? {};
  charts.staleness.update({
    empty, x: stepAxis, label: "Staleness per train step",
    y: { min: 0, max: bound + 0.6, format: (y) => number(y, Number.isInteger(y) ? 0 : 1), ticks: Math.min(4, bound + 1) },
    bound: { y: bound, label: `bound ${bound}` },
    series: [
      { label: "Max", color: "var(--amber)", points: column(rows, "staleness/max"), kind: "dots", format: (y) => number(y, 0) },
      { label: "Mean", color: "var(--violet)", points: column(rows, "staleness/mean"), width: 2 },
    ],
  });
  legend("legend-staleness", rows.length ? [
    { label: "mean", color: "var(--violet)", value: number(last["staleness/mean"]) },
    { label: "max", color: "var(--amber)", value: number(last["staleness/max"], 0) },
  ] : []);

  const timed = rows.filter((r) => TIMES.every(([key]) => isNumber(r[key])));
  charts.time.update({
    empty, x: stepAxis, label: "Time per train step, by phase",
    y: { min: 0, format: (y) => `${trim(y.toFixed(2))} s` },
    series: TIMES.map(([key, label, color]) => ({ label, color, kind: "stack", points: column(timed, key), format: seconds })),
  });
  legend("legend-time", rows.length ? TIMES.map(([, label, color]) => ({ label: label.toLowerCase(), color, block: true })) : []);
  drawSparks(empty);
  rich("training-aside", ...(trainer ? [["b", "", String(trainer.world_size)], ` rank${trainer.world_size === 1 ? "" : "s"}, incarnation ${trainer.incarnation}${trainingSpeed(rows)}`] : []));
}

function trainingSpeed(rows) {
  const recent = (key) => mean(rows.slice(-MEAN_STEPS).map((r) => r[key]).filter(isNumber));
  const [speed, mfu, peak] = ["tokens_per_second", "mfu", "peak_gib"].map(recent);
  return [
    isNumber(speed) ? `, ${short(speed)} tokens/s` : "",
    isNumber(mfu) ? ` (${Math.round(100 * mfu)} % MFU)` : "",
    isNumber(peak) ? `, ${number(peak, 1)} GiB` : "",
  ].join("");
}

const sparks = new Map();

function drawSparks(empty) {
  const host = $("sparks");
  if (!state.rows.length) {
    sparks.clear();
    const note = document.createElement("div");
    note.className = "empty";
    note.textContent = empty;
    host.replaceChildren(note);
    return;
  }
  const recorded = new Set(state.rows.slice(-50).flatMap((row) => Object.keys(row)));
  const own = [...recorded].filter((key) => key.includes("/") && !OURS.test(key)).sort().slice(0, MOST_OWN);
  for (const [key, label] of [...SPARKS, ...own.map((key) => [key, key])]) {
    if (!sparks.has(key)) {
      if (!sparks.size) host.replaceChildren();
      const row = document.createElement("div");
      row.className = "spark";
      const name = document.createElement("span");
      name.textContent = label;
      const area = document.createElement("div");
      area.className = "chart";
      const value = document.createElement("b");
      row.append(name, area, value);
      host.append(row);
      sparks.set(key, { chart: new Chart(area), value });
    }
    const { chart, value } = sparks.get(key);
    const points = column(state.rows, key);
    chart.update({ bare: true, label: `${label} per step`, series: [{ label, color: "var(--blue)", points, width: 1.5 }] });
    value.textContent = points.length ? number(points[points.length - 1][1], 3) : "–";
  }
}

// ---------------------------------------------------------------- charts over time

function timeAxis() {
  const now = state.samples[state.samples.length - 1]?.time ?? 0;
  const first = state.samples[0]?.time ?? now;
  const length = Math.max(60, now - first);
  const every = [15, 30, 60, 120, 300].find((s) => length / s <= 4) ?? 300;
  const marks = [];
  for (let ago = 0; ago <= length; ago += every) marks.push(now - ago);
  const ago = (x) => Math.round(now - x);
  return {
    min: now - length, max: now, ticks: marks,
    format: (x) => (ago(x) === 0 ? "now" : ago(x) % 60 === 0 ? `−${ago(x) / 60} min` : `−${ago(x)} s`),
    head: (x) => clock(x),
  };
}

function drawLive({ ledger, run }) {
  const x = timeAxis();
  const points = (key) => state.samples.filter((s) => isNumber(s[key])).map((s) => [s.time, s[key]]);
  const empty = "Waiting for the ledger";
  charts.queue.update({
    empty, x, label: "Live tasks by state", y: { min: 0, format: short },
    series: LIVE.map(([key, color]) => ({ label: WORDS[key] ?? key, color, kind: "stack", points: points(key), format: short })),
  });
  charts.samples.update({
    title: "Samples / s", empty, x: { ...x, hidden: true }, y: { min: 0, format: short, ticks: 2, gutter: 42 }, label: "Samples per second",
    series: [{ label: "samples/s", color: "var(--teal)", kind: "area", points: points("samples_per_s") }],
  });
  charts.tokens.update({
    title: "Tokens / s", empty, x, y: { min: 0, format: short, ticks: 2, gutter: 42 }, label: "Tokens per second",
    series: [{ label: "tokens/s", color: "var(--blue)", kind: "area", points: points("tokens_per_s") }],
  });
  if (!ledger) return;
  const entry = (name, value, key) => {
    const row = document.createElement("div");
    const term = document.createElement("dt");
    term.textContent = WORDS[name] ?? name.replace("_", "-");
    const data = document.createElement("dd");
    data.textContent = short(value);
    if (key) {
      const mark = document.createElement("span");
      mark.className = "key block";
      mark.style.setProperty("--key", key);
      row.append(mark);
    } else if (!value) row.className = "zero";
    else if (name === "dead_lettered") row.className = "alarm";
    row.append(term, data);
    if (name === "dead_lettered" && value) data.replaceChildren(lettersButton(value));
    return row;
  };
  $("live-counts").replaceChildren(...LIVE.map(([name, color]) => entry(name, ledger.counts[name], color)).reverse());
  const ended = $("ended-counts");
  const known = JSON.stringify(ENDED.map((name) => ledger.counts[name]));
  if (ended.dataset.known !== known) {  // a button that is made again each second cannot be pressed
    ended.dataset.known = known;
    ended.replaceChildren(...ENDED.map((name) => entry(name, ledger.counts[name], null)));
  }
  const limit = ledger.max_concurrent_rollouts || run.max_concurrent_rollouts;
  rich("tasks-aside", ["b", "", short(ledger.submitted)], " submitted, at most ", ["b", "", short(limit)], " running, room for ", ["b", "", short(Math.max(0, ledger.admission_headroom))], " more");
}

function lettersButton(value) {
  const button = document.createElement("button");
  button.className = "link";
  button.title = "Failed tasks and their causes";
  button.textContent = short(value);
  button.addEventListener("click", openLetters);
  return button;
}

$("find").addEventListener("submit", (event) => {
  event.preventDefault();
  window.open(`v1/trajectories/${encodeURIComponent($("find-task").value.trim())}`, "_blank", "noopener");
});

// ---------------------------------------------------------------- servers

function drawServers({ servers, versions, time }) {
  const body = $("servers");
  if (!servers?.length) {
    const row = document.createElement("tr");
    row.className = "none";
    const cell = document.createElement("td");
    cell.colSpan = 5;
    cell.textContent = servers ? "No inference server has joined yet." : "Weight sync has not answered yet.";
    row.append(cell);
    body.replaceChildren(row);
  } else {
    const current = versions?.current_version ?? Math.max(...servers.map((s) => s.version));
    body.replaceChildren(...servers.map((server) => serverRow(server, current, time)));
  }
  if (versions) {
    const pause = versions.updates ? [" weight updates, ", ["b", "", versions.update_seconds_mean ? seconds(versions.update_seconds_mean) : "no"], versions.update_seconds_mean ? " pause each, " : " pause, ", ["b", "", short(versions.aborted_requests)], " requests aborted"] : [" weight updates"];
    rich("servers-aside", ["b", "", short(versions.updates)], ...pause);
  }
}

function serverRow(server, current, time) {
  const row = document.createElement("tr");
  const cell = (...content) => {
    const data = document.createElement("td");
    data.append(...content);
    row.append(data);
    return data;
  };
  cell(server.server_id);
  const mark = document.createElement("span");
  mark.className = "pill";
  mark.append(document.createElement("i"), document.createElement("span"));
  pill(mark, SERVER_TONE[server.state] ?? "idle", server.state[0].toUpperCase() + server.state.slice(1));
  cell(mark);
  const version = cell(server.version < 0 ? "–" : `v${server.version}`);
  if (server.version >= 0 && server.version < current) {
    const behind = document.createElement("span");
    behind.className = "behind";
    behind.textContent = `${current - server.version} behind`;
    version.append(behind);
  }
  cell(server.since ? span(time - server.since) : "–");
  cell(server.cause).title = server.cause;
  return row;
}

// ---------------------------------------------------------------- the stream

let queued = false;

function draw() {
  if (queued || !state.status) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    drawHeader(state.status);
    drawTiles(state.status);
    drawSteps(state.status);
    drawLive(state.status);
    drawServers(state.status);
  });
}

function setLive(name, label) {
  $("live").dataset.state = name;
  $("live").querySelector("span").textContent = label;
  document.body.classList.toggle("stale", name === "lost");
}

const stream = new EventSource("v1/events");
stream.addEventListener("history", (event) => {
  state.samples = JSON.parse(event.data);
});
stream.addEventListener("steps", (event) => {
  const { reset, rows } = JSON.parse(event.data);
  state.rows = reset ? rows : state.rows.concat(rows);
  draw();
});
stream.addEventListener("status", (event) => {
  state.status = JSON.parse(event.data);
  const { sample } = state.status;
  if (sample && sample.time !== state.samples[state.samples.length - 1]?.time) {
    state.samples.push(sample);
    if (state.samples.length > 900) state.samples.shift();
  }
  setLive("live", "Live");
  draw();
});
stream.addEventListener("error", () => {
  setLive("lost", "Reconnecting");
  // The browser gives up after an error status; a gateway that restarts is worth another try.
  if (stream.readyState === EventSource.CLOSED) setTimeout(() => location.reload(), 3000);
});
