// Lanes over time on a canvas: one row per lane, more if bars overlap.
const MARGIN = 112, ROW = 19, GAP = 4, HEAD = 20, RULER = 18;

function toneOf(bar) {
  if (BY_KIND[bar.kind]) return BY_KIND[bar.kind];
  const lane = D.lanes[bar.lane];
  if (bar.kind !== "region" && BY_LANE[lane]) return BY_LANE[lane];
  return bar.graph === "backward" ? "backward" : bar.graph === "step" ? "update" : "forward";
}
function colour(bar) { return tone(toneOf(bar)); }

// Rows of all tracks: {track, label, y, bars} with bars in order of time, none overlapping.
const rows = [];
let lanesHeight = RULER;
for (const track of D.tracks) {
  rows.push({ track, head: track.name, note: track.note, y: lanesHeight });
  lanesHeight += HEAD;
  track.byName = new Map();
  track.bars = track.bars.map(([own, kind, lane, graph, from, to, note, critical]) => {
    const step = typeof own === "number" ? steps[own] : null;
    const bar = { step, name: step ? step.name : own, kind, lane, graph, from, to, note, critical, track };
    track.byName.set(bar.name, bar);
    return bar;
  });
  D.lanes.forEach((label, lane) => {
    const lines = [];
    for (const bar of track.bars.filter((b) => b.lane === lane).sort((a, b) => a.from - b.from)) {
      let line = lines.find((l) => l[l.length - 1].to <= bar.from + 1e-9);
      if (!line) lines.push(line = []);
      line.push(bar);
    }
    lines.forEach((bars, k) => {
      bars.forEach((bar) => { bar.y = lanesHeight; });
      rows.push({ track, label: k ? "" : label, y: lanesHeight, bars });
      lanesHeight += k < lines.length - 1 ? ROW + 1 : ROW + GAP;
    });
  });
}

const lanes = document.getElementById("lanes");
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.style.height = height + "px";
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = FONT;
  g.textBaseline = "middle";
  return [g, width];
}
function xOf(at, width) { return MARGIN + (at - axis.from) / (axis.to - axis.from) * (width - MARGIN); }
function atOf(x, width) { return axis.from + (x - MARGIN) / (width - MARGIN) * (axis.to - axis.from); }

// Visible round times of the main track with their place on the axis; none within cuts.
function ticks(width) {
  const span = axis.to - axis.from, most = Math.max(2, Math.floor((width - MARGIN) / 110));
  const step = 10 ** Math.floor(Math.log10(span / most));
  const size = [1, 2, 5, 10].map((k) => k * step).find((k) => span / k <= most);
  const found = [], f = main.folding;
  for (let t = Math.ceil(f.from(axis.from) / size) * size; f.to(t) <= axis.to && found.length < 200; t += size) {
    const cut = f.cuts.find((c) => t > c.from && t < c.to);
    if (cut) t = Math.floor(cut.to / size) * size;
    else found.push([f.to(t), t]);
  }
  return found;
}

let hovered = null;
const FONT = "11px system-ui, 'DejaVu Sans', sans-serif";
function drawLanes() {
  const [g, width] = prepare(lanes, lanesHeight);
  g.strokeStyle = ui.grid;
  g.fillStyle = ui.dim;
  g.textAlign = "center";
  for (const [at, t] of ticks(width)) {
    const x = xOf(at, width);
    g.beginPath(); g.moveTo(x, RULER - 4); g.lineTo(x, lanesHeight); g.stroke();
    if (x < width - 24 && x > MARGIN + 14) g.fillText(time(t, 5), x, 7);
  }
  for (const row of rows) drawRow(g, width, row);
  for (const track of D.tracks) drawCuts(g, width, track);
  if (hovered) drawFlow(g, width, hovered);
  g.clearRect(0, RULER, MARGIN - 4, lanesHeight);
  for (const row of rows) row.head ? drawHead(g, width, row) : drawLabel(g, row);
}
function drawHead(g, width, row) {
  g.textAlign = "left"; g.fillStyle = ui.ink; g.font = "600 " + FONT;
  g.fillText(row.head, 0, row.y + HEAD / 2 + 1);
  const beside = Math.max(MARGIN, g.measureText(row.head).width + 12);
  g.font = FONT; g.fillStyle = ui.dim;
  g.fillText(fitting(g, row.note, width - beside), beside, row.y + HEAD / 2 + 1);
}
function drawLabel(g, row) {
  g.textAlign = "right"; g.fillStyle = ui.dim;
  g.fillText(row.label, MARGIN - 8, row.y + ROW / 2);
}
// As much of a text as fits.
function fitting(g, text, room) {
  let width = g.measureText(text).width;
  if (width <= room) return text;
  let most = Math.floor(text.length * room / width);
  while (most > 0 && g.measureText(text.slice(0, most) + "…").width > room) most--;
  return most > 3 ? text.slice(0, most).trimEnd() + "…" : "";
}

function drawRow(g, width, row) {
  if (!row.bars) return;
  g.fillStyle = ui.soft;
  g.fillRect(MARGIN, row.y, width - MARGIN, ROW);
  let last = -1; // the last pixel drawn; bars that end before it are hidden
  for (const bar of row.bars) {
    const from = xOf(row.track.folding.to(bar.from), width), to = xOf(row.track.folding.to(bar.to), width);
    if (to < MARGIN || from > width || to < last) continue;
    const x = Math.max(from, MARGIN), w = Math.max(1, Math.min(to, width) - x);
    g.fillStyle = colour(bar);
    g.globalAlpha = hovered && hovered !== bar ? 0.75 : 1;
    g.fillRect(x, row.y, Math.max(1, w - (w > 4 ? 1 : 0)), ROW);
    if (bar.critical) {
      g.fillStyle = ui.critical;
      g.fillRect(x, row.y + ROW - 2, Math.max(1, w - (w > 4 ? 1 : 0)), 2);
    }
    last = x + w;
    if (w > 34) label(g, bar, x, w, row.y);
  }
  g.globalAlpha = 1;
}

function label(g, bar, x, w, y) {
  g.fillStyle = inkOn(colour(bar));
  g.textAlign = "left";
  g.fillText(fitting(g, title(bar), w - 9), x + 4, y + ROW / 2 + 1);
}
// Dark or white text, whichever has more contrast on a colour.
const inks = new Map();
function inkOn(hex) {
  if (!inks.has(hex)) {
    const [r, g, b] = [1, 3, 5].map((k) => (parseInt(hex.slice(k, k + 2), 16) / 255) ** 2.2);
    inks.set(hex, 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.26 ? "#10151c" : "#fff");
  }
  return inks.get(hex);
}
function title(bar) {
  const s = bar.step;
  if (!s) return bar.name.replace(/^(forward|backward|step) /, "");
  if (s.kind === "region") return (s.unit || "(root)") + (s.heaviest ? "  " + s.heaviest : "");
  return s.name.replace(/^(forward|backward) /, "") + (s.unit ? "  " + s.unit : "");
}

function drawCuts(g, width, track) {
  const own = rows.filter((r) => r.track === track && r.bars);
  if (!own.length) return;
  const top = own[0].y, bottom = own[own.length - 1].y + ROW;
  for (const c of track.folding.cuts) {
    const x = xOf(track.folding.to(c.from), width), w = xOf(track.folding.to(c.to), width) - x;
    if (x + w < MARGIN || x > width) continue;
    g.fillStyle = ui.cut; g.fillRect(x, top, w, bottom - top);
    g.strokeStyle = ui.edge; g.setLineDash([3, 3]); g.strokeRect(x + 0.5, top + 0.5, w - 1, bottom - top - 1); g.setLineDash([]);
    g.fillStyle = ui.ink; g.textAlign = "center";
    g.fillText(`+ ${D.layers[c.layer][2] - 1}`, x + w / 2, (top + bottom) / 2);
  }
}

// An arrow from a launch to the first step that reads its result.
function drawFlow(g, width, bar) {
  if (!bar.step || bar.kind !== "transfer") return;
  const to = bar.track.byName.get(steps[D.uses[bar.step.i]]?.name);
  if (!to) return;
  const f = bar.track.folding;
  const x0 = xOf(f.to(bar.from), width), x1 = xOf(f.to(to.from), width);
  g.strokeStyle = ui.ink; g.lineWidth = 1.5;
  g.beginPath(); g.moveTo(x0, bar.y + ROW / 2);
  g.bezierCurveTo((x0 + x1) / 2, bar.y + ROW / 2, (x0 + x1) / 2, to.y + ROW / 2, x1, to.y + ROW / 2);
  g.stroke(); g.lineWidth = 1;
  g.fillStyle = ui.ink;
  g.beginPath(); g.arc(x1, to.y + ROW / 2, 3, 0, 7); g.fill();
}

function barAt(x, y) {
  const row = rows.find((r) => r.bars && y >= r.y && y < r.y + ROW);
  if (!row || x < MARGIN) return null;
  const width = lanes.clientWidth;
  let best = null, near = 3; // pixels
  for (const bar of row.bars) {
    const from = xOf(row.track.folding.to(bar.from), width), to = Math.max(from + 1, xOf(row.track.folding.to(bar.to), width));
    const away = x < from ? from - x : x > to ? x - to : 0;
    if (away < near) { near = away; best = bar; if (!away) break; }
  }
  return best;
}
function cutAt(x, y) {
  const row = rows.find((r) => r.bars && y >= r.y && y < r.y + ROW + GAP);
  if (!row) return null;
  const t = row.track.folding.from(atOf(x, lanes.clientWidth));
  return row.track.folding.cuts.find((c) => t > c.from && t < c.to) || null;
}
