// Which part of the page is shown, and how it stays up to date while runs go on.
"use strict";

strop.PARTS = { runs: strop.runsPart, curves: strop.curvesPart, samples: strop.samplesPart, groups: strop.groupsPart, profile: strop.profilePart, diff: strop.diffPart };
strop.EVERY_MS = 4000;

strop.show = async function () {
  const { part, words } = strop.place();
  const main = document.getElementById("main");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#/${part}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `strop: ${part}`;
  strop.curves.shown = null;
  try {
    await (strop.PARTS[part] || strop.runsPart)(main, words);
  } catch (error) {
    main.append(strop.el("p", { class: "finding", role: "alert" }, error.message));
  }
};

strop.tellState = function () {
  const running = strop.all.runs.filter((run) => run.status === "running");
  strop.say(strop.kept ? "a file of its own: nothing changes here" : running.length ? running.map((run) => `${run.name}: step ${run.step}`).join(", ") : "no run is running");
};

// New runs, new steps: the table and the curves are drawn again; what somebody reads stays.
strop.keepUp = async function () {
  try {
    const before = JSON.stringify(strop.all.runs);
    strop.all = await strop.get("runs");
    strop.tellState();
    if (JSON.stringify(strop.all.runs) !== before) {
      const { part } = strop.place();
      const main = document.getElementById("main");
      if (part === "runs" && !main.contains(document.activeElement)) strop.runsPart(main);
      if (part === "curves" && strop.curves.shown) await strop.drawCurves(strop.curves.shown);
    }
  } catch (error) {
    strop.say(`the server does not answer: ${error.message}`);
  }
  setTimeout(strop.keepUp, strop.EVERY_MS);
};

strop.begin = async function () {
  strop.readKept();
  strop.all = await strop.get("runs");
  strop.tellState();
  window.addEventListener("hashchange", strop.show);
  await strop.show();
  if (strop.kept) return;
  setTimeout(strop.keepUp, strop.EVERY_MS);
  setTimeout(() => strop.plotly(), 500); // before the first chart is asked for
};

strop.begin().catch((error) => strop.say(error.message));
