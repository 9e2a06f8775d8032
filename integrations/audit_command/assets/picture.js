// The picture: a canvas with slots from top to bottom and steps from left to right. It draws only
// what is in view: one cell per slot and half step where there is room, else the most telling
// state of all slots and steps that share a pixel.

const EDGE = { left: 92, top: 8, right: 10, bottom: 40 };

class Picture {
  // `on`: callbacks hover(cell | null), choose(row), both with what is under the cursor.
  constructor(canvas, page, on) {
    Object.assign(this, { canvas, page, on });
    this.context = canvas.getContext("2d");
    this.cells = document.createElement("canvas");
    this.cursor = null;
    this.chosen = -1;
    this.request = -1;
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.readColours();
      this.draw();
    });
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const named = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = STATES.map((state) => named(state.key));
    this.packed = this.colours.map((hex) => {
      const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
      return (255 << 24) | (b << 16) | (g << 8) | r;
    });
    this.ink = { text: named("text"), quiet: named("quiet"), line: named("line"), back: named("back"), focus: named("focus") };
  }

  show(group) {
    this.group = group;
    this.cursor = null;
    this.chosen = -1;
    this.fit();
  }

  get begin() { return 2; }
  get end() { return 2 * this.page.steps + 2; }
  get rows() { return this.group.rows.length; }

  fit() {
    this.view = { x: this.begin, width: Math.max(2, this.end - this.begin), y: 0, height: Math.max(1, this.rows) };
    this.resize();
  }

  resize() {
    const width = this.canvas.parentElement.clientWidth;
    // As high as its slots, at most four fifths of the window.
    const wanted = EDGE.top + EDGE.bottom + Math.max(160, Math.min(this.rows * 16, innerHeight * 0.62));
    const ratio = window.devicePixelRatio || 1;
    this.size = { width, height: Math.round(wanted) };
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.size.height * ratio);
    this.canvas.style.height = `${this.size.height}px`;
    document.documentElement.style.setProperty("--stage-height", `${this.size.height + 2}px`);
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
  }

  get plot() {
    const { width, height } = this.size;
    return { x: EDGE.left, y: EDGE.top, width: width - EDGE.left - EDGE.right, height: height - EDGE.top - EDGE.bottom };
  }

  px(time) { return this.plot.x + ((time - this.view.x) / this.view.width) * this.plot.width; }
  py(row) { return this.plot.y + ((row - this.view.y) / this.view.height) * this.plot.height; }

  // The cell under a point of the canvas; null outside of the plot.
  cellAt(x, y) {
    const p = this.plot;
    const time = Math.floor(this.view.x + ((x - p.x) / p.width) * this.view.width);
    const row = Math.floor(this.view.y + ((y - p.y) / p.height) * this.view.height);
    const inside = x >= p.x && y >= p.y && x < p.x + p.width && y < p.y + p.height;
    return inside && row >= 0 && row < this.rows && time >= this.begin && time < this.end ? { time, row } : null;
  }

  // -- drawing ------------------------------------------------------------------------------

  draw() {
    if (!this.group || !this.size) return;
    const c = this.context, p = this.plot;
    c.clearRect(0, 0, this.size.width, this.size.height);
    this.drawCells();
    this.drawGrid();
    this.drawAxes();
    c.save();
    c.beginPath();
    c.rect(p.x - 1, p.y - 1, p.width + 2, p.height + 2);
    c.clip();
    this.drawViolations();
    this.drawCursor();
    c.restore();
  }

  drawCells() {
    const p = this.plot, v = this.view;
    const low = Math.max(0, Math.floor(v.y)), high = Math.min(this.rows, Math.ceil(v.y + v.height));
    const lines = Math.max(1, Math.min(high - low, Math.ceil(p.height)));
    const columns = Math.max(1, Math.round(p.width));
    const grid = new Uint8Array(lines * columns);
    const perRow = lines / (high - low), perTime = columns / v.width;
    for (let row = low; row < high; row++) {
      const line = Math.min(lines - 1, Math.floor((row - low) * perRow)) * columns;
      const events = this.group.rows[row];
      for (let i = Math.max(0, this.group.at(row, v.x)); i < events.length; i++) {
        const event = events[i];
        const from = Math.max(0, Math.floor((event.time - v.x) * perTime));
        if (from >= columns) break;
        const until = i + 1 < events.length ? events[i + 1].time : this.end;
        const to = Math.min(columns, Math.max(from + 1, Math.floor((until - v.x) * perTime)));
        if (until <= event.time || to <= 0) continue;
        const state = this.dimmed(event) ? STATE.left : event.state;
        for (let x = line + from; x < line + to; x++) if (grid[x] < state) grid[x] = state;
      }
    }
    const pixels = new Uint32Array(grid.length);
    for (let i = 0; i < grid.length; i++) pixels[i] = this.packed[grid[i]];
    this.cells.width = columns;
    this.cells.height = lines;
    this.cells.getContext("2d").putImageData(
      new ImageData(new Uint8ClampedArray(pixels.buffer), columns, lines), 0, 0);
    this.context.imageSmoothingEnabled = false;
    const top = this.py(low), bottom = this.py(high);
    this.context.drawImage(this.cells, 0, 0, columns, lines, p.x, top, p.width, bottom - top);
  }

  dimmed(event) {
    return this.request >= 0 && event.request !== this.request && event.state > STATE.left;
  }

  drawGrid() {
    const c = this.context, p = this.plot, v = this.view;
    const cell = p.height / v.height, step = (2 * p.width) / v.width;
    const line = (x0, y0, x1, y1, alpha, colour = this.ink.back) => {
      c.globalAlpha = alpha;
      c.strokeStyle = colour;
      c.beginPath();
      c.moveTo(x0, y0);
      c.lineTo(x1, y1);
      c.stroke();
    };
    c.lineWidth = 1;
    if (cell >= 5)
      for (let row = Math.ceil(v.y); row < v.y + v.height; row++)
        line(p.x, this.py(row), p.x + p.width, this.py(row), 0.75);
    if (step >= 14)
      for (let s = Math.ceil(v.x / 2); 2 * s < v.x + v.width; s++)
        line(this.px(2 * s), p.y, this.px(2 * s), p.y + p.height, 0.9);
    if (cell * this.group.size >= 9)
      for (let row = Math.ceil(v.y / this.group.size) * this.group.size; row < v.y + v.height; row += this.group.size)
        if (row > 0) line(p.x, this.py(row), p.x + p.width, this.py(row), 0.55, this.ink.quiet);
    c.globalAlpha = 1;
    c.strokeStyle = this.ink.line;
    c.strokeRect(p.x - 0.5, p.y - 0.5, p.width + 1, p.height + 1);
  }

  drawAxes() {
    const c = this.context, p = this.plot, v = this.view, size = this.group.size;
    c.fillStyle = this.ink.quiet;
    c.font = '12px system-ui, "DejaVu Sans", sans-serif';
    c.textAlign = "center";
    c.textBaseline = "top";
    const every = niceStep(v.width / 2 / (p.width / 70));
    for (let s = Math.max(1, Math.ceil(v.x / 2 / every) * every); 2 * s + 1 < v.x + v.width; s += every) {
      const x = this.px(2 * s + 1);
      if (x >= p.x) c.fillText(String(s), x, p.y + p.height + 5);
    }
    c.fillStyle = this.ink.text;
    c.fillText("step", p.x + p.width / 2, p.y + p.height + 22);
    c.textAlign = "right";
    c.textBaseline = "middle";
    const cell = p.height / v.height;
    c.fillStyle = this.ink.quiet;
    const noun = this.group.info.is_state ? "state" : "slot";
    if (cell >= 13) {
      for (let row = Math.floor(v.y); row < Math.min(this.rows, v.y + v.height); row++)
        this.label(`${noun} ${this.group.slotOf(row)}`, this.py(row + 0.5));
    } else {
      const blocks = Math.max(1, niceStep((v.height / size) / (p.height / 17)));
      const last = Math.min(this.group.blocks.length, (v.y + v.height) / size);
      for (let b = Math.floor(v.y / size); b < last; b++)
        if (this.group.blocks[b] % blocks === 0)
          this.label(`block ${this.group.blocks[b]}`, this.py(b * size) + Math.min(8, (cell * size) / 2));
    }
  }

  label(text, y) {
    if (y >= this.plot.y + 4 && y <= this.plot.y + this.plot.height - 4)
      this.context.fillText(text, this.plot.x - 8, y);
  }

  // A ring around every violation in view, and a line from the write that caused it.
  drawViolations() {
    const c = this.context;
    for (const violation of this.page.recording.violations) {
      const place = this.placeOf(violation);
      if (!place) continue;
      const x = this.px(place.time + 0.5), y = this.py(place.row + 0.5);
      const high = Math.max(6, Math.min(14, (this.plot.height / this.view.height) * 0.75));
      if (violation.written_step !== null) {
        const from = this.px(2 * violation.written_step + 0.5);
        this.stroke(() => { c.moveTo(from, y); c.lineTo(x - high, y); }, 2);
      }
      this.stroke(() => c.arc(x, y, high, 0, 7), 3);
    }
  }

  stroke(path, width) {
    const c = this.context;
    for (const [colour, more] of [[this.ink.back, 3], [this.colours[STATE.wrong], 0]]) {
      c.strokeStyle = colour;
      c.lineWidth = width + more;
      c.beginPath();
      path();
      c.stroke();
    }
  }

  drawCursor() {
    const c = this.context, p = this.plot;
    c.lineWidth = 2;
    c.strokeStyle = this.ink.focus;
    if (this.chosen >= 0) {
      const high = Math.max(3, this.py(this.chosen + 1) - this.py(this.chosen));
      c.strokeRect(p.x - 1, this.py(this.chosen) - 1, p.width + 2, high + 2);
    }
    if (this.cursor) {
      const x = this.px(this.cursor.time), y = this.py(this.cursor.row);
      const w = Math.max(5, this.px(this.cursor.time + 1) - x), h = Math.max(5, this.py(this.cursor.row + 1) - y);
      c.strokeStyle = this.ink.text;
      c.strokeRect(x - 1, y - 1, w + 2, h + 2);
    }
  }

  // -- moving about ---------------------------------------------------------------------------

  placeOf(violation) {
    if (violation.slot === null || violation.group !== this.group.info.name) return null;
    const row = this.group.rowOf(violation.slot);
    return row < 0 ? null : { time: 2 * violation.step, row };
  }

  zoom(factor, x, y) {
    const p = this.plot, v = this.view;
    const fx = (x - p.x) / p.width, fy = (y - p.y) / p.height;
    const width = clamp(v.width * factor, 4, this.end - this.begin);
    const height = clamp(v.height * factor, Math.min(8, this.rows), this.rows);
    this.moveTo(v.x + fx * (v.width - width), v.y + fy * (v.height - height), width, height);
  }

  moveTo(x, y, width = this.view.width, height = this.view.height) {
    const room = Math.max(2, this.end - this.begin);
    width = Math.min(width, room);
    this.view = {
      width, height,
      x: clamp(x, this.begin, this.begin + room - width),
      y: clamp(y, 0, Math.max(0, this.rows - height)),
    };
    this.draw();
  }

  // Bring a cell into view, with some of what is around it.
  goTo(cell, closer = false) {
    const v = this.view;
    const width = closer ? Math.min(v.width, 60) : v.width, height = closer ? Math.min(v.height, 64) : v.height;
    const seen = cell.time >= v.x && cell.time < v.x + v.width && cell.row >= v.y && cell.row < v.y + v.height;
    this.setCursor(cell);
    if (closer || !seen) this.moveTo(cell.time - width / 2, cell.row - height / 2, width, height);
  }

  setCursor(cell) {
    this.cursor = cell;
    this.draw();
    this.on.hover(cell, null);
  }

  moveCursor(times, rows) {
    const from = this.cursor ?? { time: Math.ceil(this.view.x), row: Math.ceil(this.view.y) };
    this.goTo({
      time: clamp(from.time + times, this.begin, this.end - 1),
      row: clamp(from.row + rows, 0, this.rows - 1),
    });
  }
}

function clamp(value, low, high) { return Math.min(Math.max(value, low), high); }

// The smallest of 1, 2, 5, 10, 20, 50, ... that is at least `rough`.
function niceStep(rough) {
  let power = 1;
  while (power * 10 < rough) power *= 10;
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? power * 10;
}
