"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const PRINTED_WIDTH = 680;

const layoutOf = (figure, choice) => ({
  ...figure.layout,
  xaxis: { ...figure.layout.xaxis, ...(figure.ranges && { range: figure.ranges[choice] }) },
  font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "#1f2328" },
  // A finger that drags wants to scroll the page.
  dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
});

// Plotly's legend knows the mouse only.
function reachByKeyboard(plot) {
  plot.querySelectorAll(".legend .traces").forEach((entry, number) => {
    const toggle = entry.querySelector(".legendtoggle");
    const label = entry.querySelector(".legendtext");
    if (!toggle || !label) return;
    toggle.setAttribute("tabindex", "0");
    toggle.setAttribute("role", "button");
    toggle.setAttribute("aria-label", "show " + label.textContent);
    toggle.setAttribute("aria-pressed", String(parseFloat(entry.style.opacity || "1") === 1));
    toggle.onkeydown = (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      plot.dataset.focus = number;
      toggle.dispatchEvent(new MouseEvent("mousedown", { bubbles: true }));
      toggle.dispatchEvent(new MouseEvent("mouseup", { bubbles: true }));
    };
  });
  if (plot.dataset.focus) {
    // The legend was drawn anew.
    const again = plot.querySelectorAll(".legend .traces .legendtoggle")[plot.dataset.focus];
    delete plot.dataset.focus;
    if (again) again.focus();
  }
}

for (const [name, figure] of Object.entries(figures)) {
  const plot = document.getElementById(name);
  const config = { responsive: true, displayModeBar: false };
  Plotly.newPlot(plot, figure.choices ? figure.choices[0] : figure.data, layoutOf(figure, 0), config).then(() => {
    plot.on("plotly_afterplot", () => reachByKeyboard(plot));
    reachByKeyboard(plot);
    plot.dataset.drawn = "0";
  });
}

for (const menu of document.querySelectorAll("select[data-plot]")) {
  menu.value = "0"; // a browser may remember another one from before a reload
  menu.addEventListener("change", () => {
    const plot = document.getElementById(menu.dataset.plot);
    const figure = figures[menu.dataset.plot];
    const choice = Number(menu.value);
    Plotly.react(plot, figure.choices[choice], layoutOf(figure, choice)).then(() => {
      plot.dataset.drawn = menu.value;
    });
  });
}

// Plots have the width of the window; paper is narrower.
addEventListener("beforeprint", () => {
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  document.querySelectorAll(".plot").forEach((plot) => Plotly.relayout(plot, { width: PRINTED_WIDTH }));
});
addEventListener("afterprint", () => {
  document.querySelectorAll(".plot").forEach((plot) => Plotly.relayout(plot, { width: null, autosize: true }));
});
