// Where the time of a run went: its phases, the largest part that a setting would save, and timelines of profiled steps.
"use strict";

strop.BAR_COLOURS = { step: 7, phase: 0, call: 2, compute: 5, wait: 1, episode: 4, answer: 8, tool: 6, reward: 3 };
strop.BAR_WIDTHS = { step: 0.9, phase: 0.7, call: 0.9, compute: 0.5, wait: 0.9, episode: 0.9, answer: 0.6, tool: 0.6, reward: 0.6 };

strop.profilePart = async function (main, words) {
  const { el, number } = strop;
  const run = words.run || [...strop.chosen][0] || (strop.all.runs[0] || {}).id;
  if (!run) { main.replaceChildren(el("p", {}, "There is no run here yet.")); return; }
  const again = (changes) => strop.go("profile", { ...words, run, ...changes });
  const answer = await strop.get("profile", { run, step: words.step || "" });
  const steps = strop.kept ? [answer.step].filter((step) => step !== null) : answer.profiled.map((one) => one.step);
  const controls = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    strop.control("run", { value: run, onchange: (event) => again({ run: event.target.value, step: "" }) }, strop.all.runs.map((one) => [one.id, one.name])),
    steps.length ? strop.control("profiled step", { value: answer.step, onchange: (event) => again({ step: event.target.value }) }, steps.map((one) => [one, String(one)])) : null);
  const rows = answer.phases.map((phase) => el("tr", {}, el("th", { scope: "row" }, phase.name), el("td", { class: "number" }, `${phase.seconds.toFixed(2)} s`),
    el("td", { class: "number" }, strop.percent(phase.share))));
  const table = el("table", {}, el("caption", {}, `${answer.num_steps} steps, ${number(answer.seconds)} s`), el("tbody", {}, rows));
  const part = answer.avoidable;
  const sentence = part === null ? el("p", {}, "No setting was found that would save time.")
    : el("p", { class: "finding plain" }, el("strong", {}, `Largest avoidable part: ${part.name}, ${part.seconds.toFixed(2)} s (${strop.percent(part.share)}). `),
      `${part.reason}. `, el("code", {}, part.setting));
  main.replaceChildren(el("h2", {}, "Time"), controls, sentence, el("div", { class: "wide" }, table));
  main.append(...answer.unreadable.map((sentence) => el("p", { class: "finding plain" }, sentence)));
  if (answer.timeline) await strop.drawTimeline(main, answer);
  else if (!answer.unreadable.length) main.append(el("p", { class: "dim" }, "No step was profiled: trainer.profile_steps=[3] adds the timeline of step 3."));
};

// Bars of every row; those of a part lie on those of the whole.
strop.drawTimeline = async function (main, answer) {
  const { el } = strop;
  const { rows, seconds, num_left_out } = answer.timeline;
  const chart = strop.chart(`timeline of step ${answer.step}`);
  chart.querySelector(".plot").style.height = `${90 + 18 * rows.length}px`;
  main.append(chart);
  const profiled = answer.profiled.find((one) => one.step === answer.step);
  main.append(el("p", { class: "dim" }, `${num_left_out ? `${num_left_out} short spans are not drawn. ` : ""}The whole timeline opens in ui.perfetto.dev: ${profiled.file}`));
  const traces = Object.keys(strop.BAR_COLOURS).map((category) => {
    const bars = rows.flatMap((row) => row.bars.filter((bar) => bar[2] === category).map((bar) => [row.name, ...bar]));
    return { type: "bar", orientation: "h", name: category, y: bars.map(([name]) => strop.plainName(name)), base: bars.map(([, start]) => start),
      x: bars.map(([, , length]) => length), text: bars.map(([, , length, , name]) => strop.plainName(`${name}: ${length.toFixed(3)} s`)),
      textposition: "none", hovertemplate: "%{text}<extra></extra>", width: strop.BAR_WIDTHS[category],
      marker: { color: strop.COLOURS[strop.BAR_COLOURS[category]], line: { width: 0.5, color: strop.ink("--paper") } } };
  }).filter((trace) => trace.x.length);
  const layout = strop.layout("seconds from the begin of the step", { yaxis: { autorange: "reversed", type: "category",
    categoryorder: "array", categoryarray: rows.map((row) => strop.plainName(row.name)) },
    more: { barmode: "overlay", hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.08 } } });
  const waits = profiled.ranks.map((rank) => `${rank.role} ${rank.rank} busy ${rank.busy_s.toFixed(2)} s`).join(", ");
  await chart.draw(traces, layout, `${seconds.toFixed(2)} s: ${waits}`);
};
