// Pointer and keys, and the first drawing.
const tip = document.getElementById("tip");
function draw() {
  drawLanes();
  drawMemory();
  showFolded();
  const f = main.folding;
  document.getElementById("range").textContent = `${time(f.from(axis.from), 4)} .. ${time(f.from(axis.to), 4)}`;
}
function say(at, lines) {
  tip.hidden = !lines;
  if (!lines) return;
  put(tip, html`<b>${lines[0]}</b>\n<span>${lines.slice(1).join("\n")}</span>`);
  const { width, height } = tip.getBoundingClientRect();
  const below = at.clientY + 16 + height < innerHeight - 8;
  tip.style.left = Math.max(4, Math.min(at.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = Math.max(4, below ? at.clientY + 16 : at.clientY - height - 12) + "px";
}
function showWhole() { show(0, axis.length); draw(); }

// -- the pointer --------------------------------------------------------------------------------
let dragged = null, hasMoved = false;
function watch(canvas, over) {
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const width = canvas.clientWidth, lines = event.deltaMode === 1 ? 16 : 1; // some browsers count lines
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      move((event.deltaX || event.deltaY) * lines / (width - MARGIN));
    } else {
      const by = Math.max(-400, Math.min(400, event.deltaY * lines));
      zoom(1.0018 ** by, atOf(Math.max(MARGIN, event.offsetX), width));
    }
    draw();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, from: axis.from, to: axis.to };
    hasMoved = false;
    canvas.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const by = (dragged.x - event.clientX) / (canvas.clientWidth - MARGIN) * (dragged.to - dragged.from);
      hasMoved ||= Math.abs(dragged.x - event.clientX) > 3;
      show(dragged.from + by, dragged.to + by);
      draw();
      say(event, null);
    } else over(event);
  });
  canvas.addEventListener("pointerleave", (event) => {
    say(event, null);
    if (hovered) { hovered = null; drawLanes(); }
  });
  canvas.addEventListener("dblclick", showWhole);
}
watch(lanes, (event) => {
  const cut = cutAt(event.offsetX, event.offsetY), bar = cut ? null : barAt(event.offsetX, event.offsetY);
  if (bar !== hovered) { hovered = bar; drawLanes(); }
  lanes.style.cursor = cut ? "pointer" : "";
  say(event, cut ? cutTip(cut) : bar ? barTip(bar) : null);
});
watch(memory, (event) => {
  const at = atOf(event.offsetX, memory.clientWidth);
  say(event, event.offsetX < MARGIN || !steps.length ? null : memoryTip(stepAt(main, main.folding.from(at))));
});

// -- folded layers: the visible part stays in place ---------------------------------------------
function refoldAround(at, change) {
  const isWhole = axis.to - axis.from > 0.999 * axis.length, x = (at - axis.from) / (axis.to - axis.from);
  const t = main.folding.from(at), span = axis.to - axis.from;
  change();
  refold();
  if (isWhole) show(0, axis.length);
  else show(main.folding.to(t) - x * span, main.folding.to(t) + (1 - x) * span);
  draw();
}
lanes.addEventListener("click", (event) => {
  const cut = hasMoved ? null : cutAt(event.offsetX, event.offsetY);
  if (cut) refoldAround(atOf(event.offsetX, lanes.clientWidth), () => opened.add(cut.layer));
});
const fold = document.getElementById("fold");
fold.onchange = () => refoldAround((axis.from + axis.to) / 2, () => { isFolded = fold.checked; opened.clear(); });
if (!D.layers.length) fold.parentElement.hidden = true;
else if (steps.length > 300) { fold.checked = isFolded = true; refold(); show(0, axis.length); }

// -- buttons and keys ---------------------------------------------------------------------------
document.getElementById("fit").onclick = showWhole;
document.getElementById("in").onclick = () => { zoom(0.5); draw(); };
document.getElementById("out").onclick = () => { zoom(2); draw(); };
function move(part) {
  const by = part * (axis.to - axis.from);
  show(axis.from + by, axis.to + by);
}
const inOrder = rows.flatMap((row) => row.bars || []);
function goTo(bar) {
  hovered = bar;
  const f = bar.track.folding, from = f.to(bar.from), to = f.to(bar.to), span = axis.to - axis.from;
  if (from < axis.from || to > axis.to) show((from + to - span) / 2, (from + to + span) / 2);
  draw();
  const box = lanes.getBoundingClientRect(), x = Math.max(MARGIN, xOf((from + to) / 2, lanes.clientWidth));
  say({ clientX: box.left + x, clientY: box.top + bar.y + ROW }, barTip(bar));
}
const KEYS = {
  ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1), "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7),
  ArrowUp: () => zoom(0.7), ArrowDown: () => zoom(1 / 0.7), Home: () => show(0, axis.length),
  Escape: () => { hovered = null; tip.hidden = true; },
};
lanes.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const at = inOrder.indexOf(hovered);
  if (event.key === "n" && inOrder.length) goTo(inOrder[(at + 1) % inOrder.length]);
  else if (event.key === "p" && inOrder.length) goTo(inOrder[(Math.max(at, 0) + inOrder.length - 1) % inOrder.length]);
  else if (KEYS[event.key]) { KEYS[event.key](); draw(); }
  else return;
  event.preventDefault();
});
lanes.addEventListener("blur", () => { if (hovered) KEYS.Escape(); drawLanes(); });

// -- the track that the memory is shown with: the first measured one ----------------------------
const under = document.getElementById("under"), choice = under.querySelector("select");
if (D.tracks.length > 1) {
  under.hidden = false;
  D.tracks.forEach((track, k) => choice.add(new Option(track.name, k)));
  choice.onchange = () => {
    main = D.tracks[choice.value];
    writeLegends();
    draw();
    [...tabs.children].find((tab) => tab.className === "on").click();
  };
  choice.value = D.beside.length ? 1 : 0;
  main = D.tracks[choice.value];
}
dark.addEventListener("change", () => { readColours(); inks.clear(); writeLegends(); draw(); });
addEventListener("resize", draw);
writeLegends();
draw();
document.documentElement.dataset.drawn = Math.round(performance.now());
