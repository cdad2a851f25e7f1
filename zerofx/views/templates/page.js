// What the pointer does, and the first drawing.
const tip = document.getElementById("tip");
function draw() {
  drawLanes();
  drawMemory();
  const f = main.folding;
  document.getElementById("range").textContent = `${time(f.from(axis.from), 4)} .. ${time(f.from(axis.to), 4)}`;
}
function say(event, lines) {
  tip.hidden = !lines;
  if (!lines) return;
  tip.innerHTML = `<b>${text(lines[0])}</b>\n<span>${text(lines.slice(1).join("\n"))}</span>`;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - height - 8)) + "px";
}
let dragged = null;
function watch(canvas, over) {
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const width = canvas.clientWidth, sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways) {
      const by = event.deltaX / (width - MARGIN) * (axis.to - axis.from);
      show(axis.from + by, axis.to + by);
    } else zoom(1.0018 ** event.deltaY, atOf(Math.max(MARGIN, event.offsetX), width));
    draw();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, from: axis.from, to: axis.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const by = (dragged.x - event.clientX) / (canvas.clientWidth - MARGIN) * (dragged.to - dragged.from);
      dragged.moved ||= Math.abs(dragged.x - event.clientX) > 3;
      show(dragged.from + by, dragged.to + by);
      draw();
      say(event, null);
    } else over(event);
  });
  canvas.addEventListener("pointerleave", (event) => {
    say(event, null);
    if (hovered) { hovered = null; drawLanes(); }
  });
  canvas.addEventListener("dblclick", () => { show(0, axis.length); draw(); });
}
watch(lanes, (event) => {
  const cut = cutAt(event.offsetX, event.offsetY), bar = cut ? null : barAt(event.offsetX, event.offsetY);
  if (bar !== hovered) { hovered = bar; drawLanes(); }
  say(event, cut ? cutTip(cut) : bar ? barTip(bar) : null);
});
watch(memory, (event) => {
  const at = atOf(event.offsetX, memory.clientWidth);
  say(event, event.offsetX < MARGIN || !steps.length ? null : memoryTip(stepAt(main, main.folding.from(at))));
});
lanes.addEventListener("click", (event) => {
  const cut = cutAt(event.offsetX, event.offsetY);
  if (!cut) return;
  opened.add(cut.layer);
  refold(); show(0, axis.length); draw();
});
document.getElementById("fit").onclick = () => { show(0, axis.length); draw(); };
document.getElementById("in").onclick = () => { zoom(0.5); draw(); };
document.getElementById("out").onclick = () => { zoom(2); draw(); };
const fold = document.getElementById("fold");
fold.onchange = () => {
  isFolded = fold.checked;
  opened.clear();
  refold(); show(0, axis.length); draw();
};
if (!D.layers.length) fold.parentElement.hidden = true;
else if (steps.length > 300) { fold.checked = isFolded = true; refold(); show(0, axis.length); }
addEventListener("resize", draw);
draw();
document.documentElement.dataset.drawn = Math.round(performance.now());
