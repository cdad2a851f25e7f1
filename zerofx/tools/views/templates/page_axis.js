"use strict";
// The data, how values are written, and the axis that lanes and memory share.
const D = JSON.parse(document.getElementById("data").textContent);
const steps = D.steps.map(([name, kind, lane, graph, unit, moves, bytes, line, names, resident, heaviest], i) => ({
  i, name, lane, bytes, resident, graph: D.graphs[graph], kind: D.texts[kind], unit: D.texts[unit],
  moves: D.texts[moves], line: D.texts[line], names: D.texts[names], heaviest: D.texts[heaviest],
}));
const isInSteps = D.in_steps; // without times, a step is one wide

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let k = 0;
  while (n >= 1024 && k < 5) { n /= 1024; k++; }
  return (k ? n.toFixed(n < 10 ? 2 : 1) : n) + " " + units[k];
}
function time(us, figures = 3) {
  if (isInSteps) return "step " + Math.round(us);
  const [unit, size] = us < 999.5 ? ["us", 1] : us < 999500 ? ["ms", 1e3] : ["s", 1e6];
  return Number((us / size).toPrecision(figures)) + " " + unit;
}

// Colours of the page's own light or dark style.
const ui = {};
function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["ink", "dim", "paper", "soft", "grid", "cut", "edge", "limit", "critical"]) {
    ui[name] = style.getPropertyValue("--" + name).trim();
  }
}
readColours();

// Intervals in which a track leaves out identical layers after the first: {from, to, layer}.
const opened = new Set();
let isFolded = false;
function cutsOf(track) {
  if (!isFolded) return [];
  const found = [];
  D.layers.forEach(([first, period, count], layer) => {
    if (opened.has(layer)) return;
    const from = track.times[first + period][0], to = track.times[first + period * count - 1][1];
    if (to > from) found.push({ from, to, layer });
  });
  return found;
}

// A track's own time to the axis, and back: a cut is only as wide as its mark.
class Folding {
  constructor(track) {
    this.end = track.end;
    this.cuts = cutsOf(track);
    const left = this.cuts.reduce((sum, c) => sum - (c.to - c.from), this.end);
    this.mark = Math.max(left, this.end / 50) * 0.03;
    this.length = left + this.mark * this.cuts.length;
  }
  to(t) {
    let gone = 0;
    for (const c of this.cuts) {
      if (t >= c.to) gone += c.to - c.from - this.mark;
      else if (t > c.from) return c.from - gone + (t - c.from) / (c.to - c.from) * this.mark;
      else break;
    }
    return t - gone;
  }
  from(x) {
    let gone = 0;
    for (const c of this.cuts) {
      const begin = c.from - gone;
      if (x <= begin) break;
      if (x < begin + this.mark) return c.from + (x - begin) / this.mark * (c.to - c.from);
      gone += c.to - c.from - this.mark;
    }
    return x + gone;
  }
}

for (const track of D.tracks) {
  track.end = Math.max(1e-9, ...track.bars.map((b) => b[5]), ...track.times.map((t) => t[1]));
}
const axis = { from: 0, to: 1, length: 1 };
function refold() {
  for (const track of D.tracks) track.folding = new Folding(track);
  axis.length = Math.max(1e-9, ...D.tracks.map((t) => t.folding.length));
}
function show(from, to) {
  const least = axis.length / 20000;
  const width = Math.min(axis.length, Math.max(least, to - from));
  axis.from = Math.max(0, Math.min(axis.length - width, from));
  axis.to = axis.from + width;
}
function zoom(factor, at = (axis.from + axis.to) / 2) {
  show(at - (at - axis.from) * factor, at + (axis.to - at) * factor);
}
refold();
show(0, axis.length);

// The track whose time is written above the lanes and shown with the memory.
let main = D.tracks[0];

// The step at a track's time.
function stepAt(track, t) {
  let low = 0, high = track.times.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (track.times[middle][0] <= t) low = middle; else high = middle - 1;
  }
  return low;
}
