// The memory of a rank under the lanes, on the same axis, with the budget.
const CATEGORY = {
  parameters: "#4878a8", gathered: "#7fc4bd", gradients: "#8fb8de", optimizer: "#e0a33e", activations: "#9c6bb3",
  temporaries: "#5aa469", communication: "#c9cfd6", inputs: "#7f8c99", outputs: "#b8a48c", buffers: "#d9774f",
};
const HEIGHT = 150;
const memory = document.getElementById("memory");
const main = D.tracks[0];
// A limit far above the peak would flatten the curve: it is said above the picture.
const limits = D.limits.filter(([, n]) => n < 3 * D.peak_bytes);
const top_bytes = 1.06 * Math.max(1, D.peak_bytes, ...limits.map(([, n]) => n));

document.getElementById("legend").innerHTML = D.memory.categories
  .map((name) => `<span><i style="background:${CATEGORY[name]}"></i>${name}</span>`).join("");

function yOf(n) { return HEIGHT - 4 - n / top_bytes * (HEIGHT - 12); }

// The fullest step of every column of pixels.
function columns(width) {
  const found = new Int32Array(Math.max(0, Math.ceil(width - MARGIN))).fill(-1);
  main.times.forEach(([from, to], i) => {
    const a = Math.floor(xOf(main.folding.to(from), width) - MARGIN);
    const b = Math.floor(xOf(main.folding.to(to), width) - MARGIN);
    for (let x = Math.max(0, a); x <= Math.min(found.length - 1, b); x++) {
      if (found[x] < 0 || steps[i].resident > steps[found[x]].resident) found[x] = i;
    }
  });
  return found;
}

function drawMemory() {
  const [g, width] = prepare(memory, HEIGHT);
  const own = columns(width);
  let begin = 0;
  for (let x = 1; x <= own.length; x++) {
    if (x < own.length && own[x] === own[begin]) continue;
    if (own[begin] >= 0) column(g, MARGIN + begin, x - begin, own[begin]);
    begin = x;
  }
  g.textAlign = "right";
  for (let k = 0; k <= 3; k++) {
    const n = top_bytes / 1.06 * k / 3;
    g.fillStyle = "#66758a"; g.fillText(bytes(Math.round(n)), MARGIN - 8, yOf(n));
    g.strokeStyle = "rgba(102, 117, 138, .18)";
    g.beginPath(); g.moveTo(MARGIN, yOf(n)); g.lineTo(width, yOf(n)); g.stroke();
  }
  for (const [name, n] of limits) line(g, width, n, "#c62828", `${name} ${bytes(n)}`);
  const peak = xOf(main.folding.to((main.times[D.peak_step][0] + main.times[D.peak_step][1]) / 2), width);
  if (peak >= MARGIN && peak <= width) {
    g.fillStyle = "#1d2733"; g.beginPath(); g.arc(peak, yOf(D.peak_bytes), 3, 0, 7); g.fill();
    g.textAlign = peak > width - 160 ? "right" : "left";
    g.fillText("peak " + bytes(D.peak_bytes), peak + (g.textAlign === "left" ? 7 : -7), yOf(D.peak_bytes) - 1);
  }
}
function column(g, x, w, i) {
  let below = 0;
  D.memory.bytes.forEach((curve, k) => {
    const y0 = yOf(below), y1 = yOf(below += curve[i]);
    g.fillStyle = CATEGORY[D.memory.categories[k]];
    g.fillRect(x, y1, w, y0 - y1);
  });
}
function line(g, width, n, colour, text) {
  g.strokeStyle = colour; g.setLineDash([6, 4]);
  g.beginPath(); g.moveTo(MARGIN, yOf(n)); g.lineTo(width, yOf(n)); g.stroke();
  g.setLineDash([]);
  g.fillStyle = colour; g.textAlign = "right"; g.fillText(text, width - 6, yOf(n) - 8);
}

// What is said of a place in the picture.
function heldAt(i) {
  return D.storages.filter((s) => s[4] <= i && i <= s[5]).slice(0, 8)
    .map(([name, where, , n]) => `${bytes(n).padStart(10)}  ${D.texts[name]}  ${D.texts[where]}`);
}
function memoryTip(i) {
  const parts = D.memory.categories.map((name, k) => [D.memory.bytes[k][i], name]).filter(([n]) => n)
    .sort((a, b) => b[0] - a[0]).map(([n, name]) => `${bytes(n).padStart(10)}  ${name}`);
  for (const [name, curve] of Object.entries(D.memory.apart)) parts.push(`${bytes(curve[i]).padStart(10)}  ${name}`);
  return [`${bytes(steps[i].resident)} at ${steps[i].name}`, steps[i].unit, ...parts, "", "largest", ...heldAt(i)];
}
function cutTip(cut) {
  const [first, period, count, unit] = D.layers[cut.layer];
  return [`${count - 1} more layers like ${unit}`, `${period} steps each, from ${steps[first + period].name} on`,
    `${time(cut.to - cut.from)} in all`, "click to open"];
}
function barTip(bar) {
  const s = bar.step, lines = [bar.name, `${bar.kind} in ${D.lanes[bar.lane]}, ${bar.track.name}`];
  lines.push(`${time(bar.to - bar.from)}, from ${time(bar.from, 5)} to ${time(bar.to, 5)}`);
  if (bar.note) lines.push(bar.note);
  if (!s) return lines;
  for (const other of D.tracks) {
    const twin = other !== bar.track && other.byStep.get(s.i);
    if (twin) lines.push(`${other.name}: ${time(twin.to - twin.from)}`);
  }
  if (s.unit) lines.push(`unit ${s.unit}`);
  if (s.moves) lines.push(`${s.kind === "region" ? "makes" : "moves"} ${s.moves}  (${bytes(s.bytes)})`);
  if (s.line) lines.push(s.line);
  const to = steps[D.uses[s.i]];
  if (to) lines.push(`first read by ${to.name}${to.unit ? ", " + to.unit : ""}`);
  if (s.names) lines.push("", s.names);
  return lines;
}
