// What all parts use: elements whose texts are never markup, answers of the server (or of the file itself), numbers.
"use strict";

const strop = {};

// An element. Strings among the children become text; null is left out; keys that begin with "on" hear events.
strop.el = function (tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected") made[name] = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return made;
};

strop.kept = null; // with --html: what the server would answer

strop.readKept = function () {
  const found = document.getElementById("kept");
  strop.kept = found ? JSON.parse(found.textContent) : null;
};

strop.get = async function (name, words) {
  if (strop.kept) return strop.fromKept(name, words || {});
  const query = new URLSearchParams(Object.entries(words || {}).filter(([, value]) => value !== "" && value !== null));
  const response = await fetch(`/api/${name}?${query}`);
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
};

// The file has everything but most samples; what it has is looked through here.
strop.fromKept = function (name, words) {
  if (name === "runs") return strop.kept.runs;
  const run = strop.kept.of_run[words.run];
  if (name === "diff") throw new Error("this file compares no runs: use strop diff");
  if (name === "samples") {
    const rows = run.samples.filter((row) => strop.matches(row, words));
    rows.sort((a, b) => b.step - a.step);
    const short = rows.map((row) => ({ ...row, num_tokens: row.sequences[row.sequences.length - 1].id.length }));
    return { rows: short, goes_on_at: null, num_steps: null, splits: ["train", "val"] };
  }
  if (name === "sample") {
    return run.samples.find((row) => row.id === words.id && row.step === Number(words.step) && row.split === words.split);
  }
  if (name === "groups") return strop.groupsOf(run.samples, words);
  return run[name];
};

strop.matches = function (row, words) {
  const part = row.reward_parts ? row.reward_parts[words.part] : undefined;
  const within = (value, low, high) =>
    (!low && !high) || (value !== null && value !== undefined && (!low || value >= Number(low)) && (!high || value <= Number(high)));
  const text = (words.text || "").toLowerCase();
  const tokens = row.sequences[row.sequences.length - 1].id.length;
  return row.split === (words.split || "train") && within(row.step, words.first_step, words.last_step)
    && within(row.score, words.lowest_score, words.highest_score) && within(tokens, words.least_tokens, words.most_tokens)
    && (!words.part || part !== undefined) && within(part, words.lowest_part, words.highest_part)
    && (!words.fate || row.fate === words.fate) && (!words.stop || row.stop_reason === words.stop)
    && (!words.source || row.data_source === words.source) && (!words.prompt || row.row === words.prompt)
    && (!text || `${row.prompt} ${row.response}`.toLowerCase().includes(text));
};

// Whether a sample passes, by the `acc` of its reward; null where nothing decides that.
strop.passes = function (row) {
  const parts = row.reward_parts || {};
  if (!Object.keys(parts).length && (row.score === 0 || row.score === 1)) return row.score === 1; // a single reward
  const acc = { true: 1, false: 0 }[parts.acc] ?? Number.parseFloat(parts.acc);
  return Number.isFinite(acc) ? acc > 0.5 : null;
};

strop.groupsOf = function (samples, words) {
  const all = samples.filter((row) => row.split === (words.split || "train"));
  const steps = [...new Set(all.map((row) => row.step))].sort((a, b) => a - b);
  const step = words.step ? Number(words.step) : steps[steps.length - 1];
  const groups = new Map();
  for (const row of all.filter((one) => one.step === step)) {
    const group = groups.get(row.uid) || { uid: row.uid, row: row.row, prompt: row.prompt, scores: [], passes: [], fates: {}, source: row.data_source };
    group.scores.push(row.score);
    if (row.score !== null) group.passes.push(strop.passes(row));
    groups.set(row.uid, group);
  }
  for (const group of groups.values()) {
    const scores = group.scores.filter((one) => one !== null);
    group.mean = scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null;
    const low = Math.min(...scores), high = Math.max(...scores);
    group.kind = !scores.length ? "unscored" : low < high ? "learning" : new Set(group.passes).size > 1 || group.passes[0] === null ? "equal" : group.passes[0] ? "solved" : "hopeless";
  }
  return { steps, step, groups: [...groups.values()], num_groups: groups.size };
};

strop.number = function (value, digits) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(digits || 4)));
};

strop.percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(1)} %`);

strop.say = function (text) {
  document.getElementById("state").textContent = text;
};

// A labelled control. `options` make a list to choose from.
strop.control = function (label, attributes, options) {
  const input = options
    ? strop.el("select", attributes, options.map(([value, text]) => strop.el("option", { value, selected: value === attributes.value }, text)))
    : strop.el("input", attributes);
  return strop.el("label", {}, label, input);
};

// The place in the address: a part of the page and words.
strop.place = function () {
  const [part, words] = location.hash.replace(/^#\/?/, "").split("?");
  return { part: part || "runs", words: Object.fromEntries(new URLSearchParams(words || "")) };
};

strop.go = function (part, words) {
  const kept = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  location.hash = `#/${part}?${new URLSearchParams(kept)}`;
};
