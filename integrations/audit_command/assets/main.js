// Reads the data, builds the lives, and ties the picture, the tables and the keys together.

document.documentElement.dataset.scripted = "true"; // the sections appear, before they are measured
const page = JSON.parse(byId("data").textContent);
page.steps = page.recording.steps.length;
page.groups = buildLives(page.recording, page.restores);

let current = -1; // the violation that was visited last
const canvas = byId("picture"), tip = byId("tip"), status = byId("status");

const picture = new Picture(canvas, page, {
  hover(cell, point) {
    const text = cell ? cellText(page, picture.group, cell) : "";
    if (point === null) status.textContent = text; // the keyboard's cursor is read out
    tip.hidden = !cell || point === null;
    if (tip.hidden) return;
    tip.textContent = text;
    const right = point.x > picture.size.width - 345;
    tip.style.left = right ? "" : `${point.x + 14}px`;
    tip.style.right = right ? `${picture.size.width - point.x + 14}px` : "";
    const low = point.y > picture.size.height - 90;
    tip.style.top = low ? "" : `${point.y + 16}px`;
    tip.style.bottom = low ? `${picture.size.height - point.y + 10}px` : "";
  },
});

function choose(cell) {
  picture.chosen = cell.row;
  picture.setCursor(cell);
  showSlot(page, picture.group, cell.row);
}

function chooseRequest(number) {
  picture.request = picture.request === number ? -1 : number;
  markRequest(picture.request);
  picture.draw();
}

function goToViolation(number) {
  const found = page.recording.violations;
  if (!found.length) return;
  current = (number + found.length) % found.length;
  const group = page.groups.find((each) => each.info.name === found[current].group);
  if (group && group !== picture.group) showGroup(group.index);
  const place = group && picture.placeOf(found[current]);
  if (place) {
    choose(place);
    picture.goTo(place, true);
  }
  status.textContent = `violation ${current + 1} of ${found.length}: ${tellViolation(found[current])}`;
}

function showGroup(index) {
  byId("group").value = String(index);
  picture.show(page.groups[index]);
}

// -- the mouse ------------------------------------------------------------------------------

const pointOf = (event) => ({ x: event.offsetX, y: event.offsetY });
let drag = null;

canvas.addEventListener("pointerdown", (event) => {
  drag = { ...pointOf(event), view: { ...picture.view }, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  const point = pointOf(event);
  if (!drag) return picture.on.hover(picture.cellAt(point.x, point.y), point);
  const dx = point.x - drag.x, dy = point.y - drag.y;
  drag.moved ||= Math.hypot(dx, dy) > 4;
  if (drag.moved)
    picture.moveTo(drag.view.x - (dx / picture.plot.width) * drag.view.width,
      drag.view.y - (dy / picture.plot.height) * drag.view.height);
});
canvas.addEventListener("pointerup", (event) => {
  const point = pointOf(event), cell = picture.cellAt(point.x, point.y);
  if (drag && !drag.moved && cell) choose(cell);
  drag = null;
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const v = picture.view, p = picture.plot;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const delta = event.deltaX || event.deltaY;
    picture.moveTo(v.x + (delta / p.width) * v.width, v.y);
  } else picture.zoom(Math.exp(clamp(event.deltaY, -60, 60) * 0.006), event.offsetX, event.offsetY);
}, { passive: false });

// -- the keyboard ------------------------------------------------------------------------------

function zoomHere(factor) {
  const at = picture.cursor, p = picture.plot;
  const x = at ? picture.px(at.time + 0.5) : p.x + p.width / 2;
  const y = at ? picture.py(at.row + 0.5) : p.y + p.height / 2;
  picture.zoom(factor, clamp(x, p.x, p.x + p.width), clamp(y, p.y, p.y + p.height));
}

const KEYS = {
  ArrowLeft: (by) => picture.moveCursor(-by, 0),
  ArrowRight: (by) => picture.moveCursor(by, 0),
  ArrowUp: (by) => picture.moveCursor(0, -by),
  ArrowDown: (by) => picture.moveCursor(0, by),
  "+": () => zoomHere(1 / 1.5),
  "=": () => zoomHere(1 / 1.5),
  "-": () => zoomHere(1.5),
  0: () => picture.fit(),
  n: () => goToViolation(current + 1),
  p: () => goToViolation(current < 0 ? -1 : current - 1),
  Enter: () => picture.cursor && choose(picture.cursor),
  Escape: () => { picture.chosen = -1; picture.setCursor(null); },
};

canvas.addEventListener("keydown", (event) => {
  const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act(event.shiftKey ? 10 : 1);
});

byId("in").addEventListener("click", () => zoomHere(1 / 1.5));
byId("out").addEventListener("click", () => zoomHere(1.5));
byId("fit").addEventListener("click", () => picture.fit());
byId("next").addEventListener("click", () => goToViolation(current + 1));
byId("previous").addEventListener("click", () => goToViolation(current < 0 ? -1 : current - 1));

// -- the first look -------------------------------------------------------------------------------

showLegend(page);
showRequests(page, chooseRequest);
showViolations(page, goToViolation);
const choice = byId("group");
page.groups.forEach((group, index) => choice.append(element("option", group.info.name, { value: index })));
choice.addEventListener("change", () => showGroup(Number(choice.value)));
byId("group-choice").hidden = page.groups.length < 2;
const wrongGroup = page.groups.findIndex((group) => page.recording.violations.some((v) => v.group === group.info.name));
showGroup(Math.max(0, wrongGroup));
const firstWrong = page.recording.violations.map((v) => picture.placeOf(v)).find((place) => place);
if (firstWrong) {
  picture.chosen = firstWrong.row;
  picture.draw();
  showSlot(page, picture.group, firstWrong.row);
}
document.documentElement.dataset.ready = "true";
