// The memory of a rank under the lanes, on the same axis, with the budget.
const HEIGHT = 150;
const memory = document.getElementById("memory");
// A limit far above the peak would flatten the curve; the facts above the lanes have it.
const limits = D.limits.filter(([, n]) => n < 3 * D.peak_bytes);
const top_bytes = 1.1 * Math.max(1, D.peak_bytes, ...D.tracks.map((t) => t.peak_bytes), ...limits.map(([, n]) => n));

function yOf(n) { return HEIGHT - 4 - n / top_bytes * (HEIGHT - 12); }

// The step with the most memory in every column of pixels.
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
    const n = top_bytes / 1.1 * k / 3;
    g.fillStyle = ui.dim; g.fillText(bytes(Math.round(n)), MARGIN - 8, yOf(n));
    g.strokeStyle = "rgba(102, 117, 138, .18)";
    g.beginPath(); g.moveTo(MARGIN, yOf(n)); g.lineTo(width, yOf(n)); g.stroke();
  }
  if (main.held.length) drawHeld(g, width, own);
  for (const [name, n] of limits) line(g, width, n, ui.limit, `${name === "budget" ? name : name + " has"} ${bytes(n)}`);
  const peak = xOf(main.folding.to((main.times[D.peak_step][0] + main.times[D.peak_step][1]) / 2), width);
  if (peak >= MARGIN && peak <= width) {
    g.fillStyle = ui.ink; g.beginPath(); g.arc(peak, yOf(D.peak_bytes), 3, 0, 7); g.fill();
    g.textAlign = peak > width - 160 ? "right" : "left";
    written(g, "peak " + bytes(D.peak_bytes), peak + (g.textAlign === "left" ? 5 : -5), yOf(D.peak_bytes) - 8);
  }
}
// Measured memory as a line over the predicted memory.
function drawHeld(g, width, own) {
  const path = new Path2D();
  let pen = false;
  own.forEach((i, x) => {
    if (i < 0 || main.held[i] < 0) return;
    const y = yOf(main.held[i]);
    if (pen) path.lineTo(MARGIN + x, y); else path.moveTo(MARGIN + x, y);
    path.lineTo(MARGIN + x + 1, y);
    pen = true;
  });
  g.strokeStyle = ui.paper; g.lineWidth = 3.5; g.stroke(path);
  g.strokeStyle = ui.ink; g.lineWidth = 1.5; g.stroke(path); g.lineWidth = 1;
}
function column(g, x, w, i) {
  let below = 0;
  D.memory.bytes.forEach((curve, k) => {
    const y0 = yOf(below), y1 = yOf(below += curve[i]);
    g.fillStyle = tone(D.memory.categories[k]);
    g.fillRect(x, y1, w, y0 - y1);
  });
}
function line(g, width, n, colour, text) {
  g.strokeStyle = colour; g.setLineDash([6, 4]);
  g.beginPath(); g.moveTo(MARGIN, yOf(n)); g.lineTo(width, yOf(n)); g.stroke();
  g.setLineDash([]);
  g.fillStyle = colour; g.textAlign = "right"; written(g, text, width - 6, yOf(n) - 8);
}
// Text with a halo, readable on any colour.
function written(g, text, x, y) {
  g.strokeStyle = ui.paper; g.lineWidth = 3; g.lineJoin = "round";
  g.strokeText(text, x, y); g.lineWidth = 1;
  g.fillText(text, x, y);
}
