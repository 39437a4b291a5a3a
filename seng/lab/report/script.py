"""The page's scripts. GUARD runs first and collects whatever goes wrong; SCRIPT draws, with plotly.js, what `data` holds.

The page says when it is done: `data-ready` of its root element is then the number of plots drawn, and `data-errors` has the
errors, none being an empty string. `?theme=dark` or `?theme=light` in its address overrules the system's setting.
"""

GUARD = """
"use strict";
const root = document.documentElement;
root.dataset.errors = "";
function failed(what) { root.dataset.errors += (root.dataset.errors && "\\n") + what; }
window.onerror = (message, source, line) => failed(`${message} (line ${line})`);
window.addEventListener("unhandledrejection", event => failed(`rejected: ${event.reason}`));
document.addEventListener("securitypolicyviolation", e => failed(`refused: ${e.blockedURI} (${e.violatedDirective})`));
"""

SCRIPT = r"""
"use strict";
const tasks = JSON.parse(document.getElementById("data").textContent);
const plots = [...document.querySelectorAll(".plot")];
const states = tasks.map(() => ({axis: "seconds", loss: "train_loss", hidden: new Set()}));
const system = matchMedia("(prefers-color-scheme: dark)");
const asked = new URLSearchParams(location.search).get("theme");
let theme = asked === "dark" || asked === "light" ? asked : null;
const isDark = () => theme ? theme === "dark" : system.matches;
const see = (hex, alpha) => `rgba(${[1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16)).join(",")},${alpha})`;

function frame() {
  const dark = isDark(), grid = dark ? "#2c313c" : "#e6e9ee", text = dark ? "#c9cfda" : "#3b414d";
  const axis = {gridcolor: grid, linecolor: grid, zeroline: false, automargin: true};
  return {
    axis, text, dark,
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: {family: "system-ui, sans-serif", size: 13, color: text}, margin: {l: 56, r: 14, t: 32, b: 48},
      hoverlabel: {bgcolor: dark ? "#262a33" : "#ffffff", bordercolor: grid, font: {color: dark ? "#f0f2f6" : "#1b1e24"}},
      modebar: {bgcolor: "rgba(0,0,0,0)", color: dark ? "#7d8696" : "#9aa1ae", activecolor: text},
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    },
  };
}

function curves(task, state, kind) {
  const {layout, axis, text, dark} = frame();
  const y = kind === "metric" ? "metric" : state.loss, x = state.axis, traces = [];
  let positive = kind !== "metric";
  for (const method of task.methods) {
    const colour = dark ? method.dark : method.light, visible = !state.hidden.has(method.name);
    const add = trace => traces.push({type: "scatter", mode: "lines", visible, name: method.name, hoverinfo: "skip", ...trace});
    const mean = method.means[x] && method.means[x][y], bold = {color: colour, width: 2.4, dash: method.dash};
    const unit = x === "seconds" ? "%{x:.1f} s" : x === "step" ? "step %{x:,.0f}" : "epoch %{x:.2f}";
    if (mean) {
      add({x: [...mean.x, ...mean.x.toReversed()], y: [...mean.high, ...mean.low.toReversed()], fill: "toself",
           fillcolor: see(colour, 0.16), line: {width: 0}});
    }
    for (const run of method.seeds) {
      positive &&= run[y].every(value => value === null || value > 0);
      add(mean ? {x: run[x], y: run[y], line: {color: see(colour, 0.4), width: 0.8}}
               : {x: run[x], y: run[y], line: bold, hoverinfo: "all",
                  hovertemplate: `<b>${method.name}</b>, seed ${run.seed}<br>%{y:.4~g} at ${unit}<extra></extra>`});
    }
    if (mean) {
      add({x: mean.x, y: mean.mean, line: bold, hoverinfo: "all", customdata: mean.low.map((low, i) => [low, mean.high[i]]),
           hovertemplate: `<b>${method.name}</b>, mean of ${method.seeds.length} seeds<br>%{y:.4~g} at ${unit}` +
                          "<br>seeds from %{customdata[0]:.4~g} to %{customdata[1]:.4~g}<extra></extra>"});
    }
    const reached = method.seeds.filter(run => run.target);
    if (kind === "metric" && reached.length) {
      add({mode: "markers", x: reached.map(run => run.target[x]), y: reached.map(run => run.target.metric), hoverinfo: "all",
           text: reached.map(run => run.seed), marker: {color: colour, symbol: method.marker, size: 9,
                                                        line: {width: 1.2, color: dark ? "#15171c" : "#ffffff"}},
           hovertemplate: `<b>${method.name}</b>, seed %{text}<br>reached the target: %{y:.4~g} at ${unit}<extra></extra>`});
    }
  }
  layout.xaxis = {...axis, title: {text: task.axes[x], standoff: 8}, rangemode: "tozero"};
  layout.yaxis = {...axis, title: {text: kind === "metric" ? task.label : y === "loss" ? "held-out loss" : "training loss"}};
  layout.uirevision = x + y;  // a zoom stays until another axis is chosen
  if (positive) Object.assign(layout.yaxis, {type: "log", dtick: "D2"});
  if (kind === "metric" && task.range) layout.yaxis.range = task.range;
  if (kind === "metric" && task.target !== null) {
    layout.shapes = [{type: "line", xref: "paper", x0: 0, x1: 1, y0: task.target, y1: task.target,
                      line: {color: text, width: 1, dash: "dot"}}];
    layout.annotations = [{xref: "paper", x: 0.005, xanchor: "left", y: task.target, yanchor: "bottom", showarrow: false,
                           text: `target ${task.target}`, font: {size: 12}}];
  }
  return [traces, layout];
}

function bars(task, state, kind, width) {
  const {layout, axis, text, dark} = frame(), rows = task.bars[kind];
  const most = Math.max(...rows.map(row => (row.mean ?? 0) + (row.half ?? 0))) || 1;
  const shapes = {solid: "", dash: "/", dot: ".", dashdot: "x", longdash: "-", longdashdot: "+"};
  const colours = task.methods.map(method => dark ? method.dark : method.light), pale = colours.map(c => see(c, 0.45));
  const room = Math.min(0.65, (18 + 7 * Math.max(...rows.map(row => row.text.length))) / Math.max(width - 110, 1));
  const trace = {
    type: "bar", orientation: "h", x: rows.map(row => row.mean), y: rows.map(row => row.name), text: rows.map(row => row.hover),
    textposition: "none", width: 0.62, hovertemplate: "<b>%{y}</b><br>%{text}<extra></extra>",
    marker: {color: pale, line: {color: colours, width: 1.5},  // pale, so that the interval is seen on every colour
             pattern: {shape: task.methods.map(method => shapes[method.dash]), fgcolor: colours, bgcolor: pale, size: 7}},
  };
  const known = rows.filter(row => row.half !== null);
  const intervals = {
    type: "scatter", mode: "markers", marker: {size: 0.1}, x: known.map(row => row.mean), y: known.map(row => row.name),
    hoverinfo: "skip", error_x: {type: "data", array: known.map(row => row.half), color: text, thickness: 1.6, width: 5},
  };
  layout.annotations = rows.map(row => ({
    x: (row.mean ?? 0) + (row.half ?? 0), y: row.name, xanchor: "left", xshift: 6, showarrow: false, text: row.text,
    font: {size: 12, color: text},
  }));
  layout.margin = {l: 10, r: 10, t: 32, b: 30};
  layout.xaxis = {...axis, range: [0, most / (1 - room)], nticks: 5};
  layout.yaxis = {...axis, autorange: "reversed", ticksuffix: " ", gridcolor: "rgba(0,0,0,0)"};
  layout.uirevision = "bars";
  return [[trace, intervals], layout];
}

function draw(plot) {
  const task = tasks[plot.dataset.task], kind = plot.dataset.kind;
  const make = kind === "metric" || kind === "loss" ? curves : bars;
  const [traces, layout] = make(task, states[plot.dataset.task], kind, plot.clientWidth);
  return Plotly.react(plot, traces, layout, {
    responsive: true, displaylogo: false, plotlyServerURL: "",  // these buttons alone, of which none uploads
    modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "autoScale2d", "resetScale2d"]],
    toImageButtonOptions: {format: "svg", filename: `${task.name}-${kind}`},
  });
}

const drawAll = list => Promise.all(list.map(plot => draw(plot)));
const ofTask = (index, kinds) => plots.filter(plot => plot.dataset.task === index && kinds.includes(plot.dataset.kind));
function press(button) {
  for (const other of button.parentElement.querySelectorAll("button")) other.setAttribute("aria-pressed", other === button);
}
function applyTheme() {
  root.dataset.theme = isDark() ? "dark" : "light";
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
}
function sort(button) {
  const heading = button.closest("th"), table = heading.closest("table"), column = heading.cellIndex;
  const down = heading.getAttribute("aria-sort") === "ascending", value = row => row.children[column].dataset.value;
  for (const other of heading.parentElement.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].sort((a, b) => {
    const [first, second] = [value(a), value(b)];
    if (first === "" || second === "") return (first === "") - (second === "");  // what is unknown stays last
    return (down ? -1 : 1) * (isNaN(first) ? first.localeCompare(second) : first - second);
  });
  table.tBodies[0].append(...rows);
}

document.addEventListener("click", event => {
  const button = event.target.closest("button");
  if (!button) return;
  const index = button.dataset.task, state = states[index];
  if (button.id === "theme") { theme = isDark() ? "light" : "dark"; applyTheme(); drawAll(plots); }
  else if (button.dataset.axis) { press(button); state.axis = button.dataset.axis; drawAll(ofTask(index, ["metric", "loss"])); }
  else if (button.dataset.loss) { press(button); state.loss = button.dataset.loss; drawAll(ofTask(index, ["loss"])); }
  else if (button.dataset.method) {
    const name = button.dataset.method, shown = state.hidden.delete(name) || !state.hidden.add(name);
    button.setAttribute("aria-pressed", shown);
    drawAll(ofTask(index, ["metric", "loss"]));
  } else if (button.closest("th")) sort(button);
});
system.addEventListener("change", () => { if (!theme) { applyTheme(); drawAll(plots); } });

applyTheme();
let drawn = 0;
Promise.all(plots.map(plot => Promise.resolve().then(() => draw(plot)).then(() => { drawn += 1; }, failed)))
  .then(() => { root.dataset.ready = drawn; });
"""
