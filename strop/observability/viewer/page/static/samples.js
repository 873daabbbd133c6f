// Samples: looked for by what they are, shown turn by turn and token by token, two side by side, one prompt over the training.
"use strict";

strop.FILTERS = [
  ["first_step", "from step", "number"], ["last_step", "to step", "number"], ["text", "text in prompt or answer", "search"],
  ["lowest_score", "score from", "number"], ["highest_score", "score to", "number"], ["least_tokens", "tokens from", "number"],
  ["most_tokens", "tokens to", "number"], ["source", "data source", "search"], ["prompt", "row of the data", "search"],
  ["part", "reward part", "search"], ["lowest_part", "part from", "number"], ["highest_part", "part to", "number"],
];
strop.pinned = null; // a sample that others are shown beside

strop.samplesPart = async function (main, words) {
  const { el } = strop;
  const run = words.run || [...strop.chosen][0] || (strop.all.runs[0] || {}).id;
  if (!run) { main.replaceChildren(el("p", {}, "There is no run here yet.")); return; }
  const again = (changes) => strop.go("samples", { ...words, run, ...changes });
  const choices = [
    strop.control("run", { value: run, onchange: (event) => again({ run: event.target.value }) }, strop.all.runs.map((one) => [one.id, one.name])),
    strop.control("of", { value: words.split || "train", onchange: (event) => again({ split: event.target.value }) }, [["train", "training"], ["val", "validation"]]),
    strop.control("what became of it", { value: words.fate || "", onchange: (event) => again({ fate: event.target.value }) },
      [["", "anything"], ["trained", "trained"], ["filtered", "filtered"], ["failed", "failed"], ["stale", "stale"]]),
    strop.control("ended", { value: words.stop || "", onchange: (event) => again({ stop: event.target.value }) },
      [["", "in any way"], ["stop", "by itself"], ["length", "at the limit"], ["aborted", "aborted"]]),
    strop.control("order", { value: words.oldest_first || "", onchange: (event) => again({ oldest_first: event.target.value }) }, [["", "newest first"], ["true", "oldest first"]]),
  ];
  const inputs = strop.FILTERS.map(([name, label, type]) => strop.control(label, { name, type, step: "any", value: words[name] || "" }));
  const form = el("form", { class: "controls", role: "search", onsubmit: (event) => {
    event.preventDefault();
    again(Object.fromEntries(new FormData(event.target)));
  } }, inputs, el("button", { type: "submit" }, "search"), el("button", { type: "button", onclick: () => strop.go("samples", { run }) }, "all"));
  const list = el("ul", { class: "results", "aria-label": "samples" });
  const more = el("p", { role: "status" }), detail = el("div", { class: "detail", "aria-live": "polite" }, "Choose a sample.");
  const dropped = el("details", { ontoggle: (event) => event.target.open && strop.showFates(dropped, run) }, el("summary", {}, "why samples were dropped"), el("div", {}));
  main.replaceChildren(el("h2", {}, "Samples"), el("div", { class: "controls" }, choices), form, dropped,
    el("div", { class: "split" }, el("div", {}, list, more), detail));
  const asked = Object.fromEntries(Object.entries(words).filter(([name]) => !["run", "id", "step"].includes(name)));
  await strop.lookOn({ run, words, asked, list, more, detail, count: 0, steps: 0 });
};

// Look through step after step until enough is found; the person may ask for more.
strop.lookOn = async function (look, startAt) {
  const { el } = strop;
  const place = location.hash;
  let at = startAt === undefined ? "" : startAt, found = 0;
  do {
    const answer = await strop.get("samples", { ...look.asked, run: look.run, start_at: at });
    if (location.hash !== place || !look.list.isConnected) return;
    for (const row of answer.rows) look.list.append(el("li", {}, strop.sampleButton(look, row)));
    if (!look.count && answer.rows.length) strop.openFirst(look, answer.rows);
    look.count += answer.rows.length;
    found += answer.rows.length;
    look.steps += answer.num_steps || 0;
    at = answer.goes_on_at;
    look.more.replaceChildren(`${look.count} found in ${look.steps} steps${at === null ? "" : `; looking on at step ${at} …`}`);
  } while (at !== null && found < 50);
  const next = at;
  const all = strop.kept ? `${look.count} of the ${strop.kept.of_run[look.run].num_samples} samples of the run are in this file` : `${look.count} found in ${look.steps} steps`;
  look.more.replaceChildren(next === null ? (look.count ? all : "No sample is like that.") : `${look.count} found so far `,
    ...(next === null ? [] : [el("button", { onclick: () => strop.lookOn(look, next) }, `look on at step ${next}`)]));
};

strop.sampleButton = function (look, row) {
  const { el } = strop;
  const good = row.score === null ? "" : row.score > 0.5 ? "good" : "bad";
  return el("button", { "data-id": row.id, "data-step": row.step, onclick: () => strop.open(look, row) },
    el("span", { class: "head" }, el("span", {}, `step ${row.step}`), el("span", {}, row.id), el("span", { class: good }, row.score === null ? "no score" : `score ${strop.number(row.score)}`),
      el("span", {}, `${row.num_tokens ?? "?"} tokens`), el("span", {}, [row.fate, row.fate_reason].filter(Boolean).join(": "))),
    el("span", { class: "text dim" }, row.prompt.slice(-120)), el("span", { class: "text" }, row.response.slice(0, 160)));
};

strop.openFirst = function (look, rows) {
  const row = rows.find((one) => one.id === look.words.id) || rows[0];
  strop.open(look, row);
};

strop.open = async function (look, row) {
  for (const one of look.list.querySelectorAll("button")) {
    one.setAttribute("aria-current", one.dataset.id === row.id && Number(one.dataset.step) === row.step);
  }
  const sample = await strop.get("sample", { run: look.run, split: look.asked.split || "train", step: row.step, id: row.id });
  const draw = () => strop.showSample(look, sample, draw);
  draw();
};

strop.showSample = function (look, sample, draw) {
  const { el } = strop;
  const values = el("p", { class: "values", role: "status" }, "Point at a token, or go through them with the arrow keys.");
  const colour = strop.control("tokens coloured by", { value: strop.colouring, onchange: (event) => { strop.colouring = event.target.value; draw(); } },
    strop.COLOURINGS.filter(([, , numberOf]) => sample.sequences.some((one) => one.id.some((_, i) => one.sampled[i] && numberOf(one, i) !== null))).map(([name, label]) => [name, label]));
  const legend = strop.COLOURINGS.find(([name]) => name === strop.colouring)[4];
  const buttons = [
    el("button", { onclick: () => strop.go("samples", { run: look.run, prompt: sample.row, split: look.asked.split, oldest_first: "true" }) }, "this prompt over the training"),
    el("button", { onclick: () => { strop.pinned = { run: look.run, sample }; draw(); } }, "keep beside others"),
    strop.pinned ? el("button", { onclick: () => { strop.pinned = null; draw(); } }, "let go of the kept one") : null,
  ];
  const shown = strop.pinned && strop.pinned.sample !== sample
    ? el("div", { class: "pair" }, strop.sampleBody(strop.pinned.run, strop.pinned.sample, values), strop.sampleBody(look.run, sample, values))
    : strop.sampleBody(look.run, sample, values);
  look.detail.replaceChildren(el("div", { class: "controls" }, colour, buttons), el("p", { class: "dim" }, legend), shown, values);
};

strop.sampleBody = function (run, sample, values) {
  const { el } = strop;
  const facts = [["run", strop.nameOf(run)], ["sample", `${sample.id}, step ${sample.step}`], ["data source", sample.data_source],
    ["score", sample.score === null ? `none (${sample.outcome || "not scored"})` : strop.number(sample.score)], ["expected", sample.ground_truth],
    ["advantage", strop.number(sample.advantage)], ["fate", [sample.fate, sample.fate_reason].filter(Boolean).join(": ")],
    ["ended", `${sample.stop_reason || "unfinished"}, ${sample.num_turns ?? "?"} turns`], ["error", sample.error],
    ...Object.entries(sample.reward_parts || {}).map(([name, value]) => [`reward: ${name}`, value]),
    ...Object.entries(sample.timings || {}).map(([name, value]) => [name, typeof value === "number" ? `${value.toFixed(3)} s` : value])];
  const listed = facts.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))]);
  const last = sample.sequences[sample.sequences.length - 1];
  const body = (sample.messages || []).length ? strop.turns(sample, values)
    : [el("h3", {}, "answer"), last.id.length ? strop.tokenBox(last, 0, last.id.length, values) : el("pre", {}, sample.response || "")];
  return el("div", {}, el("dl", {}, listed), el("h3", {}, "prompt"), el("pre", {}, sample.prompt || ""), body,
    sample.has_texts === false ? el("p", { class: "dim" }, "The model's tokenizer is not here: tokens have their ids.") : null);
};

strop.turns = function (sample, values) {
  const { el } = strop;
  let answers = 0, before = "";
  return sample.messages.map((message) => {
    if (message.role === "assistant") answers += 1;
    const sequence = sample.sequences[message.sequence || 0];
    const place = JSON.stringify([message.sequence || 0, message.tokens]);
    // An observation after which a new sequence begins has no tokens of its own in this one: its text is shown.
    const hasTokens = message.tokens && sequence && message.tokens[0] < Math.min(message.tokens[1], sequence.id.length) && place !== before;
    before = place;
    const calls = (message.tool_calls || []).map((call) => el("pre", {}, call.problem ? `broken call: ${call.problem} ${call.malformed || ""}`
      : `calls ${call.name || ""} ${typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments)}`));
    return el("section", { class: "turn" }, el("h4", {}, `turn ${answers} · ${message.role} ${message.name || ""}`),
      hasTokens ? strop.tokenBox(sequence, message.tokens[0], message.tokens[1], values)
        : [message.reasoning ? el("pre", { class: "dim" }, message.reasoning) : null, message.content ? el("pre", {}, typeof message.content === "string" ? message.content : JSON.stringify(message.content)) : null],
      calls, message.error ? el("pre", { class: "bad" }, `error: ${message.error}`) : null);
  });
};

strop.showFates = async function (box, run) {
  const { el } = strop;
  const { fates } = await strop.get("fates", { run });
  const rows = fates.map((one) => el("tr", {}, el("th", { scope: "row" }, one.fate), el("td", { class: "text" }, one.reason || "–"), el("td", { class: "number" }, String(one.count)),
    el("td", {}, one.first_step === null ? "–" : `${one.first_step} to ${one.last_step}`), el("td", {}, one.examples.join(", "))));
  box.lastElementChild.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ["fate", "why", "samples", "steps", "for example"].map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)));
};
