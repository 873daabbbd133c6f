// All runs in a table: how they stand, what tells them apart; and what each of them said.
"use strict";

strop.chosen = new Set(); // ids of the runs that curves are drawn of

strop.nameOf = (id) => (strop.all.runs.find((run) => run.id === id) || { name: id }).name;

strop.runsPart = function (main) {
  const { el } = strop;
  const keys = strop.all.differing_settings.slice(0, 8);
  const rest = strop.all.differing_settings.length - keys.length;
  const head = ["", "run", "status", "step", "pass rate (95 %)", "best", "reward", "hours", "device-hours", "tokens", "cost"];
  const rows = strop.all.runs.map((run) => strop.runRow(run, keys));
  const table = el("table", {},
    el("caption", {}, `${rows.length} runs, the newest first. Chosen ones are drawn together.${rest > 0 ? ` They differ in ${rest} more settings.` : ""}`),
    el("thead", {}, el("tr", {}, [...head, ...keys.map((key) => key.split(".").pop())].map((name, place) =>
      el("th", { scope: "col", title: keys[place - head.length] }, name)))),
    el("tbody", {}, rows));
  const draw = el("button", { onclick: () => strop.go("curves", { runs: [...strop.chosen].join(",") }) }, "draw the chosen runs");
  const problems = Object.values(strop.all.unreadable).map((text) => el("p", { class: "finding" }, text));
  main.replaceChildren(el("h2", {}, "Runs"), el("div", { class: "controls" }, draw), el("div", { class: "wide" }, table), ...problems);
  if (!rows.length) main.append(el("p", {}, "There is no run here yet."));
};

strop.runRow = function (run, keys) {
  const { el, number, percent } = strop;
  const choose = el("input", { type: "checkbox", "aria-label": `choose ${run.name}`, checked: strop.chosen.has(run.id),
    onchange: (event) => (event.target.checked ? strop.chosen.add(run.id) : strop.chosen.delete(run.id)) });
  const rate = run.pass_rate_final === null ? (run.val_reward === null ? "–" : `mean reward ${number(run.val_reward)}`)
    : `${run.pass_rate_start === null ? "" : `${percent(run.pass_rate_start)} → `}${percent(run.pass_rate_final)}`
      + (run.low === null ? "" : ` (${(100 * run.low).toFixed(1)} to ${(100 * run.high).toFixed(1)})`);
  const best = run.best_val_reward !== null ? `${number(run.best_val_reward)} at ${run.best_step}` : run.best_pass_rate === null ? "–" : `${percent(run.best_pass_rate)} at ${run.best_step}`;
  const numbers = [String(run.step), rate, best, number(run.loss === null ? run.reward : run.loss), (run.seconds / 3600).toFixed(2),
    number(run.device_hours, 3), number(run.tokens), number(run.cost)];
  return el("tr", {},
    el("td", {}, choose),
    el("th", { scope: "row" }, el("a", { href: `#/curves?runs=${run.id}`, title: run.path }, run.name)),
    el("td", { class: `status-${run.status}`, title: run.reason }, run.status),
    numbers.map((text) => el("td", { class: "number" }, text)),
    keys.map((key) => el("td", { class: "text" }, run.settings[key])));
};
