// Tokens of an answer, coloured by one of their numbers, with their values under the pointer or the arrow keys.
"use strict";

strop.COLOURINGS = [
  ["probability", "probability", (t, i) => Math.exp(Math.min(0, t.log_prob[i] ?? 0)), [0, 1], "red: unlikely when sampled"],
  ["entropy", "entropy", (t, i) => (t.entropy ? t.entropy[i] : null), [0, 2], "red: the policy was unsure"],
  ["advantage", "advantage", (t, i) => (t.advantage ? t.advantage[i] : null), [-2, 2], "green: made more likely, red: less"],
  ["ratio", "ratio of trainer and rollout", (t, i) => (t.old_log_prob ? Math.exp(t.old_log_prob[i] - t.log_prob[i]) : null), [0.8, 1.2], "away from 1: the engines differ, or the policy is newer"],
  ["provenance", "who wrote it", (t, i) => (t.sampled[i] ? 1 : 0), [0, 1], "plain: the policy, blue: given, not trained"],
  ["version", "version of the policy", (t, i) => t.version[i], null, "one colour for each version"],
];
strop.colouring = "probability";

strop.colourOf = function (kind, value, range, sampled) {
  if (kind === "provenance") return sampled ? "" : "background:#2f7fd455";
  if (!sampled || value === null || value === undefined) return "";
  if (kind === "version") return `background:${strop.COLOURS[value % 10]}44`;
  const share = Math.max(0, Math.min(1, (value - range[0]) / (range[1] - range[0])));
  if (kind === "advantage") {
    const strength = Math.min(1, Math.abs(value) / range[1]) * 0.6;
    return `background:rgba(${value >= 0 ? "20,150,70" : "200,40,30"},${strength.toFixed(2)})`;
  }
  if (kind === "ratio") return `background:rgba(200,120,0,${Math.min(0.7, Math.abs(value - 1) * 3).toFixed(2)})`;
  const strength = (kind === "probability" ? 1 - share : share) * 0.65;
  return `background:rgba(210,50,30,${strength.toFixed(2)})`;
};

// The tokens from `start` to `stop` of a sequence; `values` shows the numbers of the one that is pointed at.
strop.tokenBox = function (sequence, start, stop, values) {
  const { el } = strop;
  const [kind, , numberOf, range] = strop.COLOURINGS.find(([name]) => name === strop.colouring);
  const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `${stop - start} tokens; arrow keys go from one to the next` });
  for (let i = start; i < stop; i++) {
    const style = strop.colourOf(kind, numberOf(sequence, i), range, sequence.sampled[i]);
    box.append(el("span", { "data-i": i, style: style || null, class: sequence.sampled[i] ? null : "given" }, sequence.text[i]));
  }
  let here = null;
  const show = (span) => {
    if (!span || span === here) return;
    if (here) here.classList.remove("here");
    here = span;
    span.classList.add("here");
    values.textContent = strop.valuesOf(sequence, Number(span.dataset.i));
  };
  box.addEventListener("mouseover", (event) => show(event.target.closest("span[data-i]")));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    if (!step) return;
    event.preventDefault();
    show(here ? here[step] : box.firstElementChild);
  });
  return box;
};

strop.valuesOf = function (t, i) {
  const parts = [`token ${i}`, `id ${t.id[i]}`, JSON.stringify(t.text[i])];
  if (!t.sampled[i]) return [...parts, "given, not trained"].join(" · ");
  parts.push(`log-prob ${strop.number(t.log_prob[i])}`, `probability ${strop.number(Math.exp(Math.min(0, t.log_prob[i] ?? 0)))}`);
  if (t.entropy) parts.push(`entropy ${strop.number(t.entropy[i])}`);
  if (t.advantage) parts.push(`advantage ${strop.number(t.advantage[i])}`);
  if (t.old_log_prob) parts.push(`ratio ${strop.number(Math.exp(t.old_log_prob[i] - t.log_prob[i]))}`);
  return [...parts, `version ${t.version[i]}`].join(" · ");
};
