'use strict';
// Draws the report from the JSON in #data. Texts of the network are set as text, never as markup.

const D = JSON.parse(document.getElementById('data').textContent);
const $ = (id) => document.getElementById(id);
const ROW = 22;  // pixels of an op in the list

// ---- words and numbers

function bytes(n) {
  for (const [unit, size] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]]) {
    if (n >= size) return (n / size).toFixed(2) + ' ' + unit;
  }
  return n + ' B';
}

function seconds(s) {
  if (s >= 1) return s.toFixed(2) + ' s';
  if (s >= 1e-3) return (s * 1e3).toFixed(2) + ' ms';
  return (s * 1e6).toFixed(1) + ' µs';
}

const percent = (share) => (100 * share).toFixed(1) + '%';
const opName = (op) => D.ops.name[op];
const opKind = (op) => D.kinds[D.ops.kind[op]];
const tensorName = (t) => D.tensors.name[t] || opName(D.tensors.op[t]) + '[' + D.tensors.place[t] + ']';

function outputBytes(op) {
  let sum = 0;
  for (let t = D.ops.first[op]; t < D.ops.first[op + 1]; t++) sum += D.tensors.nbytes[D.ops.outputs[t]];
  return sum;
}

const describe = (op) =>
  `${opName(op)}\n${opKind(op)} · writes ${bytes(outputBytes(op))} · ${seconds(D.ops.seconds[op])}`;

// ---- elements

function element(parent, tag, text = '', attributes = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.append(node);
  return node;
}

function legend(id, entries) {
  $(id).replaceChildren();
  for (const [label, color] of entries) {
    const item = element($(id), 'span');
    element(item, 'i', '', {style: 'background:' + color});
    item.append(label);
  }
}

function choice(id, labels, chosen, onChange) {
  const buttons = labels.map((label, i) => {
    const button = element($(id), 'button', label, {type: 'button', 'aria-pressed': i === chosen});
    button.addEventListener('click', () => {
      buttons.forEach((b) => b.setAttribute('aria-pressed', b === button));
      onChange(i);
    });
    return button;
  });
}

function tip(event, text) {
  const box = $('tip');
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const {width, height} = box.getBoundingClientRect();
  box.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8)) + 'px';
  const below = event.clientY + 18;
  box.style.top = (below + height > innerHeight ? event.clientY - height - 10 : below) + 'px';
}

const theme = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();

// A context whose unit is the CSS pixel, cleared; its size is the element's.
function surface(canvas, width = canvas.clientWidth, height = canvas.clientHeight) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext('2d');
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = '12px system-ui, "DejaVu Sans", sans-serif';
  return context;
}

function niceStep(top, count) {
  const raw = top / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  return power * [1, 2, 5, 10].find((m) => m * power >= raw);
}

// ---- schedules: lives are rows of (step, tensor, last, role)

function prepare(schedule) {
  const n = schedule.steps.length, width = 4;
  const rows = schedule.lives.length / width;
  const live = D.roles.map(() => new Float64Array(n + 1));
  for (let i = 0; i < rows; i++) {
    const [step, tensor, last, role] = schedule.lives.slice(width * i, width * i + width);
    live[role][step] += D.tensors.nbytes[tensor];
    live[role][Math.min(last + 1, n)] -= D.tensors.nbytes[tensor];
  }
  const total = new Float64Array(n);
  for (const series of live) {
    for (let s = 0; s < n; s++) {
      if (s) series[s] += series[s - 1];
      total[s] += series[s];
    }
  }
  const begin = new Float64Array(n + 1);
  const seen = new Set();
  const again = schedule.steps.map((op) => seen.has(op) || !seen.add(op));
  schedule.steps.forEach((op, s) => { begin[s + 1] = begin[s] + D.ops.seconds[op]; });
  const peak = total.indexOf(Math.max(...total));
  return {steps: schedule.steps, lives: schedule.lives, live, total, begin, again, peak, n};
}

const schedules = [prepare(D.planned), prepare(D.unplanned)];
const state = {which: 0, inSeconds: false, step: schedules[0].peak, from: 0, to: 1, chosen: -1};
const current = () => schedules[state.which];

function aliveAt(schedule, step) {
  const result = [];
  for (let i = 0; i < schedule.lives.length; i += 4) {
    const [since, tensor, until, role] = schedule.lives.slice(i, i + 4);
    if (since <= step && step <= until) {
      result.push({tensor, since, until, role, op: D.tensors.op[tensor], nbytes: D.tensors.nbytes[tensor]});
    }
  }
  return result.sort((a, b) => b.nbytes - a.nbytes);
}

// ---- memory over the steps

const PLOT = {left: 58, right: 12, top: 12, bottom: 34};

function timelineScale() {
  const canvas = $('timeline');
  const width = canvas.clientWidth - PLOT.left - PLOT.right;
  const height = canvas.clientHeight - PLOT.top - PLOT.bottom;
  const position = (schedule, s) => state.inSeconds ? schedule.begin[s] : s;
  const end = Math.max(...schedules.map((one) => position(one, one.n))) || 1;
  const lower = state.from * end, span = (state.to - state.from) * end;
  const top = 1.06 * D.base + 1.06 * Math.max(
    ...schedules.map((one) => one.total[one.peak] || 0), (D.budget || D.total) - D.base);
  return {
    width, height, end, lower, span, top,
    x: (schedule, s) => PLOT.left + width * (position(schedule, s) - lower) / span,
    y: (nbytes) => PLOT.top + height * (1 - nbytes / top),
    value: (x) => lower + span * (x - PLOT.left) / width,
  };
}

function stepAt(schedule, value) {
  if (!state.inSeconds) return Math.max(0, Math.min(schedule.n - 1, Math.floor(value)));
  let low = 0, high = schedule.n - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (schedule.begin[middle] <= value) low = middle; else high = middle - 1;
  }
  return low;
}

function drawTimeline() {
  const c = surface($('timeline'));
  const scale = timelineScale();
  drawAxes(c, scale);
  c.save();
  c.beginPath();
  c.rect(PLOT.left, 0, scale.width, $('timeline').clientHeight - PLOT.bottom);
  c.clip();
  c.fillStyle = D.colors.fixed;
  c.fillRect(PLOT.left, scale.y(D.base), scale.width, scale.y(0) - scale.y(D.base));
  const schedule = current(), other = schedules[1 - state.which];
  const lower = new Float64Array(schedule.n).fill(D.base);
  D.roles.forEach(([, color], role) => {
    const upper = lower.map((n, s) => n + schedule.live[role][s]);
    area(c, scale, schedule, lower, upper, color);
    lower.set(upper);
  });
  outline(c, scale, other, D.colors.unplanned);
  if (D.budget) rule(c, scale, D.budget, D.colors.budget, []);
  rule(c, scale, state.which ? D.unplannedTotal : D.total, theme('ink'), [2, 3]);
  marker(c, scale, schedule, schedule.peak, theme('soft'), [2, 3]);
  marker(c, scale, schedule, state.step, theme('ink'), []);
  c.restore();
}

function drawAxes(c, scale) {
  const [unit, size] = [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10], ['B', 1]]
    .find(([, s]) => scale.top >= s || s === 1);
  const step = niceStep(scale.top / size, 6);
  c.textAlign = 'right';
  c.textBaseline = 'middle';
  for (let v = 0; v <= scale.top / size; v += step) {
    const y = scale.y(v * size);
    c.fillStyle = theme('grid');
    c.fillRect(PLOT.left, y, scale.width, 1);
    c.fillStyle = theme('soft');
    c.fillText(String(+v.toFixed(6)) + (v + step > scale.top / size ? ' ' + unit : ''), PLOT.left - 6, y);
  }
  c.textAlign = 'center';
  c.textBaseline = 'top';
  const factor = state.inSeconds ? 1e3 : 1;
  const tick = niceStep(scale.span * factor, 10);
  const first = Math.ceil(scale.lower * factor / tick) * tick;
  for (let v = first; v <= (scale.lower + scale.span) * factor; v += tick) {
    const x = PLOT.left + scale.width * (v / factor - scale.lower) / scale.span;
    c.fillText(+v.toFixed(6), x, scale.y(0) + 5);
  }
  c.fillText(state.inSeconds ? 'milliseconds' : 'step', PLOT.left + scale.width / 2, scale.y(0) + 19);
}

function area(c, scale, schedule, lower, upper, color) {
  c.fillStyle = color;
  c.beginPath();
  for (let s = 0; s < schedule.n; s++) {
    c.lineTo(scale.x(schedule, s), scale.y(upper[s]));
    c.lineTo(scale.x(schedule, s + 1), scale.y(upper[s]));
  }
  for (let s = schedule.n - 1; s >= 0; s--) {
    c.lineTo(scale.x(schedule, s + 1), scale.y(lower[s]));
    c.lineTo(scale.x(schedule, s), scale.y(lower[s]));
  }
  c.fill();
}

function outline(c, scale, schedule, color) {
  c.strokeStyle = color;
  c.lineWidth = 1.5;
  c.beginPath();
  for (let s = 0; s < schedule.n; s++) {
    c.lineTo(scale.x(schedule, s), scale.y(D.base + schedule.total[s]));
    c.lineTo(scale.x(schedule, s + 1), scale.y(D.base + schedule.total[s]));
  }
  c.stroke();
}

function rule(c, scale, nbytes, color, dashes) {
  c.strokeStyle = color;
  c.lineWidth = 1.5;
  c.setLineDash(dashes);
  c.beginPath();
  c.moveTo(PLOT.left, scale.y(nbytes));
  c.lineTo(PLOT.left + scale.width, scale.y(nbytes));
  c.stroke();
  c.setLineDash([]);
}

function marker(c, scale, schedule, step, color, dashes) {
  const x = (scale.x(schedule, step) + scale.x(schedule, step + 1)) / 2;
  c.strokeStyle = color;
  c.lineWidth = 1;
  c.setLineDash(dashes);
  c.beginPath();
  c.moveTo(x, PLOT.top);
  c.lineTo(x, scale.y(0));
  c.stroke();
  c.setLineDash([]);
}

function describeStep(step) {
  const schedule = current(), op = schedule.steps[step];
  return `step ${step}${schedule.again[step] ? ' · recomputation' : ''}\n${describe(op)}\n` +
    `alive: ${bytes(schedule.total[step])} + ${bytes(D.base)} fixed`;
}

function startTimeline() {
  const canvas = $('timeline');
  let pressed = null;
  const x = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const at = (event) => stepAt(current(), timelineScale().value(x(event)));
  canvas.addEventListener('pointermove', (event) => {
    drawTimeline();
    if (pressed !== null && Math.abs(x(event) - pressed) > 5) {
      const c = canvas.getContext('2d');
      c.fillStyle = 'rgba(90, 140, 200, .25)';
      c.fillRect(pressed, PLOT.top, x(event) - pressed, canvas.clientHeight - PLOT.top - PLOT.bottom);
    }
    tip(event, describeStep(at(event)));
  });
  canvas.addEventListener('pointerleave', () => { pressed = null; tip(null, ''); drawTimeline(); });
  canvas.addEventListener('pointerdown', (event) => { pressed = x(event); });
  canvas.addEventListener('pointerup', (event) => {
    if (pressed === null) return;
    const scale = timelineScale(), ends = [pressed, x(event)].sort((a, b) => a - b);
    pressed = null;
    if (ends[1] - ends[0] > 5) {
      [state.from, state.to] = ends.map((p) => Math.max(0, Math.min(1, scale.value(p) / scale.end)));
      drawTimeline();
    } else show(at(event));
  });
  canvas.addEventListener('dblclick', () => { state.from = 0; state.to = 1; drawTimeline(); });
  canvas.addEventListener('keydown', (event) => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    show(Math.max(0, Math.min(current().n - 1, state.step + move)));
  });
}

// ---- alive at a step

function show(step) {
  state.step = step;
  drawTimeline();
  drawAlive();
}

function drawAlive() {
  const schedule = current(), step = state.step, op = schedule.steps[step];
  const alive = aliveAt(schedule, step);
  const peak = step === schedule.peak ? ', the peak' : '';
  $('alive-title').textContent = `Alive at step ${step}${peak}: ${bytes(schedule.total[step])}`;
  $('alive-text').textContent =
    `${state.which ? 'without a plan' : 'planned'} · while ${opName(op)} (${opKind(op)}) ` +
    `${schedule.again[step] ? 'runs again' : 'runs'} · ${alive.length} tensors`;
  bars('by-kind', sums(alive, (a) => opKind(a.op)), () => D.colors.unplanned);
  bars('by-role', sums(alive, (a) => D.roles[a.role][0]),
    (name) => D.roles.find(([role]) => role === name)[1]);
  drawLayers(alive);
  drawTensors(schedule, alive);
}

function sums(alive, key) {
  const result = new Map();
  for (const a of alive) result.set(key(a), (result.get(key(a)) || 0) + a.nbytes);
  return [...result].sort((a, b) => b[1] - a[1]);
}

function bars(id, entries, color) {
  $(id).replaceChildren();
  const total = entries.reduce((sum, [, n]) => sum + n, 0) || 1;
  const top = entries.length ? entries[0][1] : 1;
  const nshown = entries.length > 10 ? 9 : entries.length;
  const shown = entries.slice(0, nshown).map(([name, n]) => [name, n, color(name)]);
  const rest = entries.slice(nshown).reduce((sum, [, n]) => sum + n, 0);
  if (rest) shown.push([`the other ${entries.length - nshown}`, rest, D.colors.fixed]);
  for (const [name, n, fill] of shown) {
    const row = element($(id), 'div');
    element(row, 'span', name);
    element(row, 'span', `${bytes(n)} · ${percent(n / total)}`);
    element(row, 'b', '', {style: `width:${Math.min(100, 100 * n / top)}%;background:${fill}`});
  }
}

let layerSums = [];

function sumLayers(alive) {
  const layers = Array.from({length: D.nforward}, () => ({total: 0, roles: []}));
  for (const a of alive) {
    const layer = layers[D.ops.layer[a.op]];
    if (!layer) continue;
    layer.total += a.nbytes;
    layer.roles[a.role] = (layer.roles[a.role] || 0) + a.nbytes;
  }
  return layers;
}

function drawLayers(alive) {
  const c = surface($('layers'));
  const width = $('layers').clientWidth, height = $('layers').clientHeight - 4;
  layerSums = sumLayers(alive);
  const before = sumLayers(aliveAt(schedules[1], schedules[1].peak));
  const top = Math.max(1, ...[...before, ...layerSums].map((layer) => layer.total));
  const w = width / D.nforward, bar = Math.max(1, w > 4 ? w - 1 : w);
  c.fillStyle = theme('line');
  c.fillRect(0, height, width, 1);
  before.forEach(({total}, i) => c.fillRect(i * w, height, bar, -height * total / top));
  layerSums.forEach((layer, i) => {
    let y = height;
    layer.roles.forEach((n, role) => {
      const h = height * n / top;
      c.fillStyle = D.roles[role][1];
      c.fillRect(i * w, y - h, bar, h);
      y -= h;
    });
  });
  $('layers-title').textContent = 'By layer, in the order of the network ' +
    `(the highest: ${bytes(top)}; grey: at the peak without a plan)`;
}

function drawTensors(schedule, alive) {
  const table = $('tensors');
  table.replaceChildren();
  const head = element(table, 'tr');
  for (const title of ['tensor', 'kind', 'role']) element(head, 'th', title);
  element(head, 'th', 'bytes', {class: 'n'});
  element(head, 'th', 'since', {class: 'n'});
  element(head, 'th', 'until it is read by');
  for (const a of alive.slice(0, 200)) {
    const row = element(table, 'tr', '', {'data-op': D.ops.layer[a.op]});
    element(row, 'td', tensorName(a.tensor), {class: 'name'});
    element(row, 'td', opKind(a.op));
    const role = element(row, 'td', '', {class: 'role'});
    element(role, 'i', '', {
      style: `display:inline-block;width:.7em;height:.7em;background:${D.roles[a.role][1]}`});
    role.append(' ' + D.roles[a.role][0]);
    element(row, 'td', bytes(a.nbytes), {class: 'n'});
    element(row, 'td', a.since, {class: 'n'});
    const reader = a.until < schedule.n ? `step ${a.until}, ${opName(schedule.steps[a.until])}` : 'the end';
    element(row, 'td', reader, {class: 'name'});
    row.addEventListener('click', () => choose(D.ops.layer[a.op], true));
  }
  if (alive.length > 200) element(element(table, 'tr'), 'td', `and ${alive.length - 200} smaller ones`);
}

// ---- the network

const LANE = Math.max(3, Math.min(14, 190 / Math.max(1, D.network.nlanes)));
const LANES_WIDTH = LANE * D.network.nlanes + 12;
const laneX = (lane) => 10 + LANE * lane;
const fateOf = (op) => D.fates[D.network.fates[op]];
let hits = [];

function drawList() {
  const list = $('list'), rows = $('rows');
  rows.style.height = ROW * D.nforward + 'px';
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 2);
  const last = Math.min(D.nforward, first + Math.ceil(list.clientHeight / ROW) + 5);
  rows.replaceChildren(drawGraph(first, last));
  for (let op = first; op < last; op++) {
    const row = element(rows, 'div', '', {class: 'op', style: `top:${op * ROW}px;left:${LANES_WIDTH}px`});
    if (hits.includes(op)) row.classList.add('hit');
    if (op === state.chosen) row.classList.add('chosen');
    element(row, 'span', opName(op));
    element(row, 'span', opKind(op));
    element(row, 'span', bytes(outputBytes(op)));
    element(row, 'span', seconds(D.ops.seconds[op]));
    row.addEventListener('click', () => choose(op, false));
    row.addEventListener('pointermove', (event) => tip(event, `${describe(op)}\n${fateOf(op)[0]}`));
    row.addEventListener('pointerleave', () => tip(null, ''));
  }
}

function drawGraph(first, last) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  const top = first * ROW, y = (op) => op * ROW + ROW / 2 - top;
  svg.setAttribute('width', LANES_WIDTH);
  svg.setAttribute('height', (last - first) * ROW);
  svg.style.top = top + 'px';
  const add = (tag, attributes) => {
    const node = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    svg.append(node);
  };
  const lanes = D.network.lanes, edges = D.network.edges;
  for (let i = 0; i < edges.length; i += 2) {
    const [source, target] = [edges[i], edges[i + 1]];
    if (target < first || source >= last) continue;
    const [x, to] = [laneX(lanes[source]), laneX(lanes[target])];
    const down = Math.max(y(source), y(target) - ROW);
    const d = `M${x} ${y(source)}V${down}C${x} ${y(target) - ROW / 2} ${to} ${y(target) - ROW / 2} ${to} ${y(target)}`;
    add('path', {d, fill: 'none', stroke: theme('soft'), 'stroke-width': 1.2, opacity: .7});
  }
  for (let op = first; op < last; op++) {
    const size = 4 + 7 * Math.sqrt(D.network.largest[op] / D.network.top);
    add('rect', {
      x: laneX(lanes[op]) - size / 2, y: y(op) - size / 2, width: size, height: size, rx: 1.5,
      fill: fateOf(op)[1]});
  }
  return svg;
}

function drawOverview() {
  const c = surface($('overview'));
  const width = $('overview').clientWidth, height = $('overview').clientHeight;
  const w = width / D.nforward;
  for (let op = 0; op < D.nforward; op++) {
    const h = 3 + (height - 8) * D.network.largest[op] / D.network.top;
    c.fillStyle = fateOf(op)[1];
    c.fillRect(op * w, height - h, Math.max(1, w > 4 ? w - 1 : w), h);
  }
  const list = $('list');
  c.strokeStyle = theme('ink');
  c.strokeRect(list.scrollTop / ROW * w, .5, Math.max(3, list.clientHeight / ROW * w), height - 1);
}

function choose(op, scroll) {
  state.chosen = op;
  if (scroll) {
    $('list').scrollTop = ROW * op - $('list').clientHeight / 2;
    $('network').scrollIntoView({block: 'start'});
  }
  drawList();
  drawOverview();
  const why = $('why');
  why.replaceChildren();
  if (op < 0) {
    element(why, 'p', 'No op is chosen.', {class: 'hint'});
    return;
  }
  const [fate, color] = fateOf(op);
  element(why, 'h3', opName(op));
  const line = element(why, 'p');
  element(line, 'i', '', {style: `display:inline-block;width:.8em;height:.8em;background:${color}`});
  line.append(` ${fate} · ${opKind(op)} · ${seconds(D.ops.seconds[op])}`);
  for (const text of D.network.why[op]) element(why, 'p', text);
}

function startNetwork() {
  $('list').addEventListener('scroll', () => { drawList(); drawOverview(); });
  $('list').addEventListener('keydown', (event) => {
    const move = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    const op = Math.max(0, Math.min(D.nforward - 1, state.chosen + move));
    if (op * ROW < $('list').scrollTop || (op + 1) * ROW > $('list').scrollTop + $('list').clientHeight) {
      $('list').scrollTop = ROW * op - $('list').clientHeight / 2;
    }
    choose(op, false);
  });
  const overOp = (event, canvas) => {
    const box = canvas.getBoundingClientRect();
    return Math.max(0, Math.min(D.nforward - 1,
      Math.floor((event.clientX - box.left) / box.width * D.nforward)));
  };
  $('overview').addEventListener('click', (event) => {
    const op = overOp(event, $('overview'));
    $('list').scrollTop = ROW * op - $('list').clientHeight / 2;
    choose(op, false);
  });
  $('overview').addEventListener('pointermove', (event) => {
    const op = overOp(event, $('overview'));
    tip(event, `${describe(op)}\n${fateOf(op)[0]}`);
  });
  $('layers').addEventListener('pointermove', (event) => {
    const op = overOp(event, $('layers'));
    tip(event, `${opName(op)}\n${opKind(op)} · ${bytes(layerSums[op].total)} alive of it`);
  });
  for (const id of ['overview', 'layers']) $(id).addEventListener('pointerleave', () => tip(null, ''));
  let nextHit = 0;
  $('find').addEventListener('input', () => {
    const text = $('find').value.trim().toLowerCase();
    hits = [];
    for (let op = 0; text && op < D.nforward; op++) {
      if (`${opName(op)} ${opKind(op)}`.toLowerCase().includes(text)) hits.push(op);
    }
    nextHit = 0;
    $('found').textContent = text ? `${hits.length} found${hits.length > 1 ? '; Enter goes on' : ''}` : '';
    if (hits.length) $('list').scrollTop = ROW * hits[0] - 60;
    drawList();
  });
  $('find').addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || !hits.length) return;
    const op = hits[nextHit++ % hits.length];
    $('list').scrollTop = ROW * op - $('list').clientHeight / 2;
    choose(op, false);
  });
}

// ---- the matrices R and S

const matrix = (() => {
  const steps = D.planned.steps, nops = D.ops.name.length;
  const seen = new Set(), computed = [], again = [];
  for (const op of steps) {
    const stage = Math.min(seen.size, nops - 1);
    (seen.has(op) ? again : computed).push([stage, op]);
    seen.add(op);
  }
  const waits = Array.from({length: nops}, () => []);
  for (let i = 0; i < D.waits.length; i += 3) waits[D.waits[i]].push([D.waits[i + 1], D.waits[i + 2]]);
  return {nops, computed, again, waits, zoom: 1, side: 1};
})();

function drawMatrix() {
  const fitting = Math.min(860, $('matrix-scroll').clientWidth - 4);
  const side = matrix.side = Math.min(6000, fitting * matrix.zoom);
  const canvas = $('cells');
  canvas.style.width = canvas.style.height = side + 'px';
  const c = surface(canvas, side, side);
  const w = side / matrix.nops, cell = Math.max(w, 1);
  const colors = D.cells.map(([, color]) => color);
  c.fillStyle = colors[0];
  matrix.waits.forEach((spans, op) => {
    for (const [begin, end] of spans) c.fillRect(op * w, begin * w, cell, (end - begin + 1) * w);
  });
  for (const [points, color, size] of [
    [matrix.computed, colors[1], cell], [matrix.again, colors[2], Math.max(cell, 1.6)]]) {
    c.fillStyle = color;
    for (const [stage, op] of points) c.fillRect(op * w, stage * w, size, size);
  }
  c.strokeStyle = theme('soft');
  c.setLineDash([2, 3]);
  c.strokeRect(-1, -1, D.nforward * w + 1, D.nforward * w + 1);
}

function cellAt(event) {
  const box = $('cells').getBoundingClientRect();
  const index = (offset) => Math.min(matrix.nops - 1, Math.floor(offset / matrix.side * matrix.nops));
  return [index(event.clientY - box.top), index(event.clientX - box.left)];
}

function describeCell(stage, op) {
  // A recomputation is hard to hit where a cell is less than a pixel.
  const reach = Math.max(0, Math.ceil(matrix.nops / matrix.side) - 1);
  const near = matrix.again.find(([t, i]) => Math.abs(t - stage) <= reach && Math.abs(i - op) <= reach);
  if (near) [stage, op] = near;
  let what = '';
  if (near) what = D.cells[2][0];
  else if (matrix.computed.some(([t, i]) => t === stage && i === op)) what = D.cells[1][0];
  else if (matrix.waits[op].some(([begin, end]) => begin <= stage && stage <= end)) what = D.cells[0][0];
  if (!what) return `stage ${stage}, op ${op}: ${opName(op)}`;
  return `stage ${stage}, op ${op}: ${what}\n${describe(op)}`;
}

function startMatrix() {
  $('cells').addEventListener('pointermove', (event) => tip(event, describeCell(...cellAt(event))));
  $('cells').addEventListener('pointerleave', () => tip(null, ''));
  const zooms = [1, 2, 4];
  choice('zoom', zooms.map((z) => '×' + z), 0, (i) => { matrix.zoom = zooms[i]; drawMatrix(); });
}

// ---- overhead against memory: rows of (strategy, total bytes, overhead, budget in words, status)

const strategies = [...new Set(D.others.map(([strategy]) => strategy))];
const seriesColor = (strategy) => D.colors.series[strategies.indexOf(strategy) % D.colors.series.length];

function scatterScale() {
  const canvas = $('scatter');
  const right = 1.04 * Math.max(D.unplannedTotal, ...D.others.map((row) => row[1]));
  const top = 1.12 * Math.max(0.01, ...D.others.map((row) => row[2]));
  const width = canvas.clientWidth - 80, height = canvas.clientHeight - 50;
  return {right, top, x: (n) => 60 + width * n / right, y: (share) => 10 + height * (1 - share / top)};
}

function drawScatter() {
  if (!D.others.length) return;
  const c = surface($('scatter')), scale = scatterScale();
  const stepY = niceStep(scale.top, 6), stepX = niceStep(scale.right / 2 ** 30, 8);
  c.fillStyle = theme('soft');
  c.textAlign = 'right';
  for (let v = 0; v <= scale.top; v += stepY) {
    c.fillText(percent(v), 52, scale.y(v) + 4);
    c.save();
    c.fillStyle = theme('grid');
    c.fillRect(60, scale.y(v), $('scatter').clientWidth - 80, 1);
    c.restore();
  }
  c.textAlign = 'center';
  for (let v = 0; v <= scale.right / 2 ** 30; v += stepX) {
    c.fillText(+v.toFixed(6), scale.x(v * 2 ** 30), scale.y(0) + 18);
  }
  c.fillText('GiB of the whole step', scale.x(scale.right / 2), scale.y(0) + 34);
  for (const strategy of strategies) {
    const points = D.others.filter((row) => row[0] === strategy).sort((a, b) => a[1] - b[1]);
    c.strokeStyle = c.fillStyle = seriesColor(strategy);
    c.lineWidth = 1.5;
    c.beginPath();
    for (const [, n, overhead] of points) c.lineTo(scale.x(n), scale.y(overhead));
    c.stroke();
    for (const [, n, overhead] of points) dot(c, scale.x(n), scale.y(overhead));
  }
  c.fillStyle = D.colors.unplanned;
  dot(c, scale.x(D.unplannedTotal), scale.y(0));
}

function dot(c, x, y) {
  c.beginPath();
  c.arc(x, y, 4.5, 0, 7);
  c.fill();
}

function startScatter() {
  if (!D.others.length) return;
  $('others').hidden = false;
  legend('others-legend', [
    ...strategies.map((strategy) => [strategy, seriesColor(strategy)]), ['no plan', D.colors.unplanned]]);
  $('scatter').addEventListener('pointermove', (event) => {
    const box = $('scatter').getBoundingClientRect(), scale = scatterScale();
    const far = (row) => Math.hypot(
      scale.x(row[1]) - event.clientX + box.left, scale.y(row[2]) - event.clientY + box.top);
    const row = D.others.reduce((a, b) => far(b) < far(a) ? b : a);
    tip(event, far(row) < 40
      ? `${row[0]} · ${row[4]}\n${bytes(row[1])} at +${percent(row[2])}\nbudget: ${row[3]}` : '');
  });
  $('scatter').addEventListener('pointerleave', () => tip(null, ''));
  const head = element($('others-table'), 'tr');
  for (const title of ['strategy', 'budget', 'status']) element(head, 'th', title);
  for (const title of ['whole step', 'overhead']) element(head, 'th', title, {class: 'n'});
  for (const [strategy, n, overhead, budget, status] of D.others) {
    const row = element($('others-table'), 'tr');
    for (const text of [strategy, budget, status]) element(row, 'td', text);
    for (const text of [bytes(n), '+' + percent(overhead)]) element(row, 'td', text, {class: 'n'});
  }
}

// ---- all of it

function stepsLegend() {
  const other = state.which ? 'planned' : 'without a plan';
  const used = D.roles.filter((_, role) => current().live[role].some((n) => n > 0));
  const lines = [[other, D.colors.unplanned]];
  if (D.budget) lines.push([`budget ${bytes(D.budget)}`, D.colors.budget]);
  lines.push([`MXNet holds ${bytes(state.which ? D.unplannedTotal : D.total)}`, theme('ink')]);
  legend('steps-legend', [['fixed', D.colors.fixed], ...used, ...lines]);
}

function drawAll() {
  stepsLegend();
  drawTimeline();
  drawAlive();
  drawList();
  drawOverview();
  drawMatrix();
  drawScatter();
}

function start() {
  choice('which', ['planned', 'without a plan'], 0, (which) => {
    state.which = which;
    stepsLegend();
    show(current().peak);
  });
  if (schedules[0].begin[schedules[0].n] > 0) {
    choice('axis', ['by step', 'by time'], 0, (i) => { state.inSeconds = i === 1; drawTimeline(); });
  }
  const counts = D.fates.map((_, fate) => D.network.fates.filter((f) => f === fate).length);
  legend('network-legend', D.fates.map(([name, color], i) => [`${name} (${counts[i]})`, color])
    .filter((_, i) => counts[i]));
  legend('matrix-legend', D.cells);
  startTimeline();
  startNetwork();
  startMatrix();
  startScatter();
  choose(D.network.chosen, false);
  drawAll();
  addEventListener('resize', drawAll);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
}

addEventListener('error', (event) => { document.documentElement.dataset.error = event.message; });
start();
document.documentElement.dataset.readyMs = Math.round(performance.now());
