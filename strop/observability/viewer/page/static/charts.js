// Charts, drawn by plotly. Each has a sentence for who cannot see it.
"use strict";

strop.COLOURS = ["#0b62c4", "#d1495b", "#1b998b", "#e08e0b", "#7b4fb5", "#4a7a2a", "#c2478f", "#5f6b7a", "#00889b", "#a3641c"];

// Plotly comes when the first chart is drawn; in a file of its own it is there.
strop.drawing = null;
strop.plotly = function () {
  if (window.Plotly) return window.Plotly;
  strop.drawing = strop.drawing || new Promise((resolve, reject) => {
    document.head.append(strop.el("script", { src: "/static/plotly.min.js", onload: () => resolve(window.Plotly),
      onerror: () => reject(new Error("plotly's script does not load")) }));
  });
  return strop.drawing;
};

strop.ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

strop.layout = function (across, extra) {
  const line = { gridcolor: strop.ink("--line"), zerolinecolor: strop.ink("--line"), automargin: true };
  return {
    margin: { l: 48, r: 10, t: 8, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: strop.ink("--ink"), size: 11 }, showlegend: false, hovermode: "x unified", uirevision: "kept",
    hoverlabel: { bgcolor: strop.ink("--paper"), font: { color: strop.ink("--ink") } },
    xaxis: { title: { text: across }, ...line }, yaxis: { ...line, ...((extra || {}).yaxis || {}) }, ...((extra || {}).more || {}),
  };
};

// A chart with a heading; `draw` changes what it shows and says.
strop.chart = function (title) {
  const plot = strop.el("div", { class: "plot", role: "img", "aria-label": title });
  const box = strop.el("section", { class: "chart", "aria-label": title }, strop.el("h3", {}, title), plot);
  box.draw = async (traces, layout, sentence) => {
    plot.setAttribute("aria-label", `${title}. ${sentence}`);
    const plotly = await strop.plotly();
    if (plot.isConnected) await plotly.react(plot, traces, layout, { responsive: true, displaylogo: false, displayModeBar: false });
  };
  return box;
};

// Text of hovers and axes is markup to plotly, so what stands for markup is taken from names.
strop.plainName = (text) => String(text).replace(/[<>&]/g, (one) => ({ "<": "‹", ">": "›", "&": "＆" })[one]);

// The mean of each value and those before it, `count` in all.
strop.smooth = function (values, count) {
  const window = [];
  return values.map((value) => {
    if (value === null) return null;
    window.push(value);
    if (window.length > count) window.shift();
    return window.reduce((a, b) => a + b, 0) / window.length;
  });
};
