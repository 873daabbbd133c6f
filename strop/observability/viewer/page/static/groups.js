// The prompts of a step: how their samples were rewarded, and how many are solved, hopeless or learning over the training.
"use strict";

strop.KINDS = { solved: "#0a7a3b", learning: "#0b62c4", hopeless: "#b3261e", equal: "#8a6d1b", unscored: "#5b6470" };

strop.groupsPart = async function (main, words) {
  const { el } = strop;
  const run = words.run || [...strop.chosen][0] || (strop.all.runs[0] || {}).id;
  if (!run) { main.replaceChildren(el("p", {}, "There is no run here yet.")); return; }
  const split = words.split || "train";
  const again = (changes) => strop.go("groups", { ...words, run, ...changes });
  const answer = await strop.get("groups", { run, split, step: words.step || "" });
  const controls = el("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    strop.control("run", { value: run, onchange: (event) => again({ run: event.target.value, step: "" }) }, strop.all.runs.map((one) => [one.id, one.name])),
    strop.control("of", { value: split, onchange: (event) => again({ split: event.target.value, step: "" }) }, [["train", "training"], ["val", "validation"]]),
    strop.control("step", { value: answer.step, onchange: (event) => again({ step: event.target.value }) }, answer.steps.map((one) => [one, String(one)])));
  const over = strop.chart("share of prompts over the training"), spread = strop.chart("rewards of this step by prompt");
  main.replaceChildren(el("h2", {}, "Prompts"), controls, el("div", { class: "charts" }, over, spread), strop.groupTable(run, split, answer));
  await strop.drawShares(over, run);
  const sorted = [...answer.groups].sort((a, b) => (a.mean ?? -1e9) - (b.mean ?? -1e9));
  const traces = Object.entries(strop.KINDS).map(([kind, color]) => {
    const points = sorted.flatMap((group, place) => (group.kind === kind ? group.scores.filter((one) => one !== null).map((score) => [place, score, group.uid]) : []));
    return { x: points.map(([at]) => at), y: points.map(([, y]) => y), text: points.map(([, , uid]) => strop.plainName(uid)), name: kind, mode: "markers", marker: { color, size: 6, opacity: 0.6 } };
  }).filter((trace) => trace.x.length);
  const counts = strop.countKinds(answer.groups);
  spread.draw(traces, strop.layout("prompts, the hardest first", { more: { hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -0.25 } } }),
    Object.entries(counts).map(([kind, count]) => `${count} ${kind}`).join(", "));
};

strop.countKinds = function (groups) {
  const counts = {};
  for (const group of groups) counts[group.kind] = (counts[group.kind] || 0) + 1;
  return counts;
};

strop.drawShares = async function (chart, run) {
  const names = { solved: "rollout/groups_all_max", learning: "rollout/groups_mixed", hopeless: "rollout/groups_all_min", equal: "rollout/groups_all_equal" };
  const { axes, columns } = await strop.get("metrics", { run, names: Object.values(names).join(",") });
  const traces = Object.entries(names).filter(([, name]) => (columns[name] || []).some((one) => one !== null)).map(([kind, name]) => {
    const points = columns[name].map((y, i) => [axes.step[i], y]).filter(([, y]) => y !== null);
    return { x: points.map(([x]) => x), y: points.map(([, y]) => y), name: kind, stackgroup: "all", line: { width: 0.5, color: strop.KINDS[kind] } };
  });
  const last = traces.map((one) => `${one.name} ${strop.percent(one.y[one.y.length - 1])} at last`).join(", ");
  chart.draw(traces, strop.layout("step", { yaxis: { tickformat: ".0%" }, more: { showlegend: true, legend: { orientation: "h", y: -0.25 } } }), last || "no numbers");
};

strop.groupTable = function (run, split, answer) {
  const { el } = strop;
  const colour = (score) => (score === null ? "#8888" : score > 0.5 ? "#0a7a3b" : score > 0 ? "#e08e0b" : "#b3261e");
  const rows = answer.groups.slice(0, 500).map((group) => el("tr", {},
    el("th", { scope: "row" }, el("a", { href: `#/samples?run=${run}&split=${split}&first_step=${answer.step}&last_step=${answer.step}&prompt=${group.row}` }, group.uid)),
    el("td", { class: "text" }, group.prompt.slice(-160)), el("td", {}, group.kind), el("td", { class: "number" }, strop.number(group.mean)),
    el("td", {}, el("span", { class: "strip", role: "img", "aria-label": `scores ${group.scores.slice(0, 32).map((one) => strop.number(one, 3)).join(", ")}` },
      group.scores.slice(0, 32).map((score) => el("i", { style: `background:${colour(score)}`, title: strop.number(score) })))),
    el("td", {}, el("a", { href: `#/samples?run=${run}&split=${split}&prompt=${group.row}&oldest_first=true` }, "over the training"))));
  return el("div", { class: "wide" }, el("table", {},
    el("caption", {}, `${answer.num_groups ?? answer.groups.length} prompts of step ${answer.step ?? "–"}: ${Object.entries(strop.countKinds(answer.groups)).map(([kind, count]) => `${count} ${kind}`).join(", ")}`),
    el("thead", {}, el("tr", {}, ["prompt", "text", "", "mean", "scores of its samples", ""].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)));
};
