// Two runs: the first step and stage where they part, with the sample that shows it, and the settings that differ.
"use strict";

strop.diffPart = async function (main, words) {
  const { el } = strop;
  const runs = strop.all.runs.map((one) => [one.id, one.name]);
  if (runs.length < 2) { main.replaceChildren(el("h2", {}, "Difference"), el("p", {}, "Two runs are needed: strop view RUN_A RUN_B.")); return; }
  const [first, second] = [...strop.chosen];
  const a = words.a || first || runs[0][0], b = words.b || second || runs.map(([id]) => id).find((id) => id !== a);
  const controls = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    strop.control("run", { value: a, onchange: (event) => strop.go("diff", { a: event.target.value, b }) }, runs),
    strop.control("and", { value: b, onchange: (event) => strop.go("diff", { a, b: event.target.value }) }, runs));
  const box = el("div", { "aria-live": "polite" }, "comparing …");
  main.replaceChildren(el("h2", {}, "Difference"), controls, box);
  const found = await strop.get("diff", { a, b });
  const sentence = found.error || (found.equal ? `Equal to the bit over all ${found.num_common_steps} steps that both have.`
    : `Step ${found.step} differs first in ${found.stage}; ${found.num_equal_steps} common steps before it are equal.`);
  const settings = Object.entries(found.settings || {});
  box.replaceChildren(el("p", {}, el("strong", {}, sentence)),
    found.cause ? el("p", {}, `It begins with ${found.cause === "schedule" ? "the schedule" : "numbers"}.`) : "",
    el("div", { class: "pair", id: "sides" }),
    el("table", {}, el("caption", {}, `${settings.length} settings differ`), el("thead", {}, el("tr", {}, ["setting", strop.nameOf(a), strop.nameOf(b)].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, settings.map(([key, [left, right]]) => el("tr", {}, el("th", { scope: "row" }, key), el("td", { class: "text" }, JSON.stringify(left)), el("td", { class: "text" }, JSON.stringify(right)))))));
  if (found.sample) {
    box.children[0].after(el("p", {}, `${found.sample.id}: ${found.sample.difference}`));
    const values = el("p", { class: "values", role: "status" });
    const sides = await Promise.all([a, b].map((run) => strop.get("sample", { run, step: found.step, id: found.sample.id }).catch(() => null)));
    sides.forEach((sample, place) => sample && document.getElementById("sides").append(strop.sampleBody([a, b][place], sample, values)));
    document.getElementById("sides").after(values);
  }
};
