"""The page's style: light and dark, from a phone to a wide screen."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: light-dark(#ffffff, #15171c); --raised: light-dark(#f6f7f9, #1d2027); --text: light-dark(#1b1e24, #e7e9ee);
  --quiet: light-dark(#565d6b, #a3abba); --line: light-dark(#d9dde4, #343945); --accent: light-dark(#0059a8, #6db5f2);
  --mind: light-dark(#fff6e0, #332a14); --mind-line: light-dark(#d99b00, #b98a1c);
}
:root[data-theme=light] { color-scheme: light; }
:root[data-theme=dark] { color-scheme: dark; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
header, main, footer { max-width: 1240px; margin: 0 auto; padding: 0 20px; }
header { padding-top: 28px; display: flex; flex-wrap: wrap; gap: 4px 24px; align-items: center; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; flex: 1 1 auto; }
h2 { font-size: 1.35rem; margin: 0 0 4px; }
h3 { font-size: 1rem; margin: 28px 0 6px; }
p { margin: 6px 0; }
header p, nav { flex: 1 0 100%; }
nav ul { list-style: none; margin: 8px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 6px 18px; }
a { color: var(--accent); }
section { margin-top: 36px; padding-top: 24px; border-top: 1px solid var(--line); }
.quiet, figcaption, footer { color: var(--quiet); font-size: .88rem; }
.mind { background: var(--mind); border-left: 4px solid var(--mind-line); padding: 8px 14px; margin: 14px 0;
  font-size: .92rem; }
.mind ul { margin: 2px 0; padding-left: 20px; }
.mind, td, code { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 12px 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--quiet); font-size: .88rem; padding-bottom: 4px; }
th, td { padding: 6px 12px 6px 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, .words td, .words th { text-align: left; }
.words { min-width: 760px; }
thead th { vertical-align: bottom; color: var(--quiet); font-weight: 600; }
tbody th { font-weight: 600; white-space: nowrap; }
.standings td { white-space: nowrap; }
button { font: inherit; color: inherit; background: var(--raised); border: 1px solid var(--line); border-radius: 6px;
  padding: 5px 12px; cursor: pointer; min-height: 34px; }
button:hover { border-color: var(--accent); }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
th button { border: 0; background: none; padding: 0; font-weight: 600; text-align: inherit; min-height: 0; }
th[aria-sort=ascending] button::after { content: " ▲"; } th[aria-sort=descending] button::after { content: " ▼"; }
.bar { display: flex; flex-wrap: wrap; gap: 8px 20px; margin: 14px 0 4px; align-items: center; }
.group { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
.group > span { color: var(--quiet); font-size: .88rem; }
button[aria-pressed=true] { border-color: var(--accent); box-shadow: inset 0 0 0 1px var(--accent); }
.methods button { display: inline-flex; align-items: center; gap: 8px; box-shadow: none; border-color: var(--line); }
.methods button[aria-pressed=false] { opacity: .45; text-decoration: line-through; }
.methods svg { width: 30px; height: 10px; overflow: visible; }
.methods line { stroke: light-dark(var(--light), var(--dark)); stroke-width: 3; }
.grid { display: grid; gap: 20px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.grid.three { grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; }
.plot { width: 100%; height: 390px; }
.chip { display: inline-block; background: var(--raised); border-radius: 4px; padding: 0 6px; margin: 0 4px 4px 0; }
code { font: .86em/1.5 ui-monospace, monospace; }
summary { cursor: pointer; padding: 6px 0; }
footer { padding-top: 32px; padding-bottom: 32px; }
@media (max-width: 640px) { header, main, footer { padding-left: 12px; padding-right: 12px; } .plot { height: 320px; }
  h1 { font-size: 1.4rem; } }
@media print { button, nav { display: none; } section { break-before: page; } }
"""
