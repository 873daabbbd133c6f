// Curves of the chosen runs over one another, where the time of each step goes, and what the runs said.
"use strict";

strop.FIRST = [
  ["reward", ["critic/rewards/mean", "critic/score/mean", "train/loss", "prefer/loss"]],
  ["pass rate", ["val-core/pass_rate", "val/loss", "val/prefer/rewards/accuracies"]],
  ["mean reward of validation", ["val-core/mean_reward", /^val-core\/.*\/mean@/]],
  ["entropy", ["actor/entropy"]],
  ["length of answers", ["response_length/mean"]],
  ["answers cut at the limit", ["response_length/clip_ratio"]],
  ["gradient norm", ["actor/grad_norm", "train/grad_norm"]],
  ["KL of rollout and trainer", ["rollout_corr/kl"]],
  ["tokens per second", ["perf/throughput"]],
];

strop.curves = { numbers: new Map() };

strop.curvesPart = async function (main, words) {
  const { el } = strop;
  const ids = (words.runs ? words.runs.split(",") : strop.all.runs.slice(0, 1).map((run) => run.id))
    .filter((id) => strop.all.runs.some((run) => run.id === id));
  strop.chosen = new Set(ids);
  const again = (changes) => strop.go("curves", { ...words, runs: ids.join(","), ...changes });
  const controls = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    strop.control("against", { value: words.x || "step", onchange: (event) => again({ x: event.target.value }) },
      ["step", "samples", "tokens", "hours"].map((one) => [one, one])),
    strop.control("mean of so many steps", { type: "number", min: 1, max: 500, value: words.smooth || 1,
      onchange: (event) => again({ smooth: event.target.value }) }),
    strop.control("also metrics with", { type: "search", value: words.also || "", placeholder: "timing_s/", list: "metrics",
      onchange: (event) => again({ also: event.target.value }) }),
    el("datalist", { id: "metrics" }));
  const legend = el("p", {}, ids.map((id, place) => el("span", {},
    el("span", { style: `color:${strop.COLOURS[place % 10]}`, "aria-hidden": "true" }, "━━ "), el("a", { href: `#/samples?run=${id}` }, strop.nameOf(id)), "   ")));
  const charts = el("div", { class: "charts" });
  const phases = el("div", {}), findings = el("div", {});
  main.replaceChildren(el("h2", {}, "Curves"), controls, legend, charts,
    el("h2", {}, "Where the time of a step goes"), phases, el("h2", {}, "What the runs said"), findings);
  if (!ids.length) { charts.append(el("p", {}, "Choose runs on the page of runs.")); return; }
  await strop.drawCurves({ ids, words, charts, phases, findings });
};

strop.drawCurves = async function (shown) {
  const { ids, words } = shown;
  const known = await Promise.all(ids.map((run) => strop.get("metrics", { run })));
  const names = [...new Set(known.flatMap((one) => one.names))].sort();
  const list = document.getElementById("metrics");
  if (list && !list.childElementCount) list.append(...names.map((value) => strop.el("option", { value })));
  const panels = strop.panels(names, words.also);
  const wanted = [...new Set(panels.flatMap((panel) => panel.names))];
  const [numbers, events] = await Promise.all([
    Promise.all(ids.map((run) => strop.get("metrics", { run, names: wanted.join(",") }))),
    Promise.all(ids.map((run) => strop.get("events", { run }))),
  ]);
  if (!shown.made) shown.made = new Map();
  for (const panel of panels) {
    if (!shown.made.has(panel.title)) {
      shown.made.set(panel.title, strop.chart(panel.title));
      shown.charts.append(shown.made.get(panel.title));
    }
    strop.drawPanel(shown.made.get(panel.title), panel, ids, numbers, events, words);
  }
  strop.drawPhases(shown, ids[0], events[0]);
  strop.drawFindings(shown.findings, ids, events);
  strop.curves.shown = shown;
};

strop.panels = function (names, also) {
  const fits = (pattern, name) => (pattern instanceof RegExp ? pattern.test(name) : pattern === name);
  const panels = [];
  for (const [title, patterns] of strop.FIRST) {
    const found = patterns.map((pattern) => names.filter((name) => fits(pattern, name))).filter((some) => some.length);
    if (found.length) panels.push({ title, names: found.flat() });
  }
  for (const name of also ? names.filter((one) => one.includes(also)).slice(0, 24) : []) panels.push({ title: name, names: [name] });
  return panels;
};

strop.drawPanel = function (chart, panel, ids, numbers, events, words) {
  const axis = words.x || "step", count = Number(words.smooth || 1);
  const traces = [], ends = [];
  ids.forEach((id, place) => {
    const { axes, columns } = numbers[place];
    const name = panel.names.find((one) => (columns[one] || []).some((value) => value !== null));
    if (!name) return;
    const points = columns[name].map((y, i) => [axes[axis][i], y, axes.step[i]]).filter(([, y]) => y !== null);
    const x = points.map(([at]) => at), raw = points.map(([, y]) => y);
    const colour = strop.COLOURS[place % 10], isSparse = points.length < axes.step.length / 2;
    const y = count > 1 && !isSparse ? strop.smooth(raw, count) : raw;
    const label = strop.plainName(strop.nameOf(id));
    if (y !== raw) traces.push({ x, y: raw, mode: "lines", line: { color: colour, width: 1 }, opacity: 0.25, hoverinfo: "skip" });
    traces.push({ x, y, name: label, mode: isSparse || points.length < 2 ? "lines+markers" : "lines", line: { color: colour, width: 2 } });
    ends.push(`${strop.nameOf(id)}: ${strop.number(raw[0])} at first, ${strop.number(raw[raw.length - 1])} at last`);
    const marks = events[place].events.filter((event) => event.kind !== "finished" && event.step > 0);
    const where = marks.map((event) => axes[axis][axes.step.indexOf(event.step)]).map((one) => (one === undefined ? null : one));
    if (marks.length) {
      traces.push({ x: where, y: marks.map((event) => y[points.findIndex(([, , step]) => step >= event.step)] ?? y[y.length - 1]),
        mode: "markers", marker: { symbol: "triangle-down", size: 9, color: colour, line: { width: 1, color: strop.ink("--ink") } },
        name: label, text: marks.map((event) => strop.plainName(`${event.kind}: ${event.text}`.slice(0, 160))), hovertemplate: "%{text}<extra></extra>" });
    }
  });
  const isRate = panel.title === "pass rate" && traces.every((one) => one.y.every((value) => value === null || (value >= 0 && value <= 1)));
  chart.draw(traces, strop.layout(axis, { yaxis: isRate ? { tickformat: ".0%" } : {} }), ends.join("; ") || "no numbers yet");
};

strop.drawPhases = function (shown, id, answer) {
  const { el } = strop;
  if (!answer.steps.length) { shown.phases.replaceChildren(el("p", {}, "No step has ended yet.")); return; }
  const names = Object.keys(answer.phases);
  if (!shown.phaseChart) {
    shown.phaseChart = strop.chart("seconds of each step, by phase");
    shown.stepBox = el("div", {});
    shown.phases.replaceChildren(el("p", { class: "dim" }, `of ${strop.nameOf(id)}`), el("div", { class: "charts" }, shown.phaseChart, shown.stepBox));
  }
  const traces = names.map((name, place) => ({ x: answer.steps, y: answer.phases[name].map((one) => one ?? 0), name: strop.plainName(name),
    type: "bar", marker: { color: strop.COLOURS[place % 10] } }));
  const totals = names.map((name) => [name, answer.phases[name].reduce((sum, one) => sum + (one ?? 0), 0)]).sort((a, b) => b[1] - a[1]);
  const whole = totals.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  shown.phaseChart.draw(traces, strop.layout("step", { more: { barmode: "stack", bargap: 0, showlegend: true, legend: { orientation: "h", y: -0.3 } } }),
    totals.map(([name, seconds]) => `${name} ${((100 * seconds) / whole).toFixed(0)} %`).join(", "));
  shown.stepBox.replaceChildren(strop.stepTimeline(answer, names));
};

// The phases of one step, one after the other.
strop.stepTimeline = function (answer, names) {
  const { el } = strop;
  const box = el("div", {});
  const draw = (step) => {
    const place = Math.max(0, answer.steps.indexOf(step));
    const seconds = names.map((name) => [name, answer.phases[name][place] ?? 0]).filter(([, one]) => one > 0);
    const whole = seconds.reduce((sum, [, one]) => sum + one, 0) || 1;
    let before = 0;
    const rows = seconds.map(([name, one]) => {
      const bar = el("div", { style: `margin-left:${(100 * before) / whole}%;width:${Math.max(0.5, (100 * one) / whole)}%;height:.9rem;background:${strop.COLOURS[names.indexOf(name) % 10]}` });
      before += one;
      return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "number" }, `${one.toFixed(3)} s`),
        el("td", { class: "number" }, `${((100 * one) / whole).toFixed(1)} %`), el("td", { style: "width:40%", "aria-hidden": "true" }, bar));
    });
    box.replaceChildren(el("table", { style: "width:100%" }, el("caption", {}, `phases of step ${answer.steps[place]}: ${whole.toFixed(3)} s`), el("tbody", {}, rows)));
  };
  const last = answer.steps[answer.steps.length - 1];
  draw(last);
  return el("section", { class: "chart", "aria-label": "phases of one step" },
    el("div", { class: "controls" }, strop.control("step", { type: "number", min: answer.steps[0], max: last, value: last,
      onchange: (event) => draw(Number(event.target.value)) })), box);
};

strop.drawFindings = function (box, ids, events) {
  const { el } = strop;
  const found = ids.flatMap((id, place) => events[place].events.map((event) => ({ ...event, run: id })));
  box.replaceChildren(...found.slice(-200).reverse().map((event) => el("p", { class: `finding ${["health", "crashed"].includes(event.kind) ? "" : "plain"}` },
    el("strong", {}, `${ids.length > 1 ? `${strop.nameOf(event.run)}, ` : ""}step ${event.step}: `), `${event.kind}${event.text ? `: ${event.text}` : ""} `,
    event.step > 0 ? el("a", { href: `#/samples?run=${event.run}&first_step=${event.step}&last_step=${event.step}` }, "samples") : null)));
  if (!found.length) box.append(el("p", { class: "dim" }, "Nothing to say so far."));
};
