// Curves of one or several runs: drag to zoom, double-click for all of it, move over them to read numbers.
// The body of a function of `element` (holds a .ht-charts), `props` (`words` and `value` as JSON) and `watch(name, call)`:
// in the web UI these are Gradio's, in a run's report the page gives them. No other server is asked for anything.
const root = element.querySelector('.ht-charts');
const words = JSON.parse(props.words);
const NS = 'http://www.w3.org/2000/svg';
const LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 38;
const AXES = {step: 0, tokens: 1, time: 2};  // places in a row of `data.scales`
let data = {charts: [], runs: [], scales: {}}, zoom = null, raw = true, smooth = true, log = false, axis = 'step';

const make = (name, attributes = {}, text) => {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
};
const html = (name, className, text) => {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const spell = (value) => {
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(size >= 1e6 ? 2 : 1).replace('e+', 'e');
  return size >= 1000 ? Math.round(value).toLocaleString('en') : String(+value.toPrecision(4));
};
const ticks = (low, high, wanted) => {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const gap = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) || 10 * power;
  const found = [];
  for (let mark = Math.ceil(low / gap - 1e-9) * gap; mark <= high + gap * 1e-6; mark += gap) found.push(+mark.toPrecision(12));
  return found;
};
const title = (chart) => words[chart.name] || chart.name;
const colour = (run) => `var(--ht-l${(data.runs.indexOf(run) % 6) + 1})`;

// Where a step lies on the chosen axis: between the steps that the server has told of, in a straight line.
function placed(run, step) {
  const known = data.scales[run] || [], column = AXES[axis];
  if (!column || !known.length) return step;
  let low = 0, high = known.length - 1;
  if (step <= known[0][0]) return known[0][0] ? (step / known[0][0]) * known[0][column] : known[0][column];
  if (step >= known[high][0]) return known[high][column];
  while (high - low > 1) { const middle = (low + high) >> 1; if (known[middle][0] <= step) low = middle; else high = middle; }
  const share = (step - known[low][0]) / (known[high][0] - known[low][0]);
  return known[low][column] + share * (known[high][column] - known[low][column]);
}
const clock = (seconds) => {
  const whole = Math.round(seconds), two = (number) => String(number).padStart(2, '0');
  return whole >= 3600 ? `${Math.floor(whole / 3600)}:${two(Math.floor((whole % 3600) / 60))} h` : `${Math.floor(whole / 60)}:${two(whole % 60)}`;
};
const spellAxis = (value) => (axis === 'time' ? clock(value) : axis === 'tokens' ? spell(value) : Math.round(value).toLocaleString('en'));

// Lines to draw; a point is [place on the axis, value, step].
function drawn(chart) {
  const lines = [], put = (run, points) => points.map(([step, value]) => [placed(run, step), value, step]);
  for (const line of chart.lines) {
    const both = line.smooth.length > 0;
    if (raw || !both) lines.push({run: line.run, points: put(line.run, line.points), kind: both && smooth ? 'raw' : 'main'});
    if (both && smooth) lines.push({run: line.run, points: put(line.run, line.smooth), kind: 'main'});
  }
  return lines;
}

function whole() {  // all charts show the same stretch of steps
  let left = Infinity, right = -Infinity;
  for (const chart of data.charts) for (const line of chart.lines) {
    left = Math.min(left, placed(line.run, line.points[0][0]));
    right = Math.max(right, placed(line.run, line.points[line.points.length - 1][0]));
  }
  return [left, right];
}

function bounds(lines, logarithmic) {
  let low = Infinity, high = -Infinity, left, right;
  for (const line of lines) for (const [step, value] of line.points) {
    if (zoom && (step < zoom[0] || step > zoom[1])) continue;
    if (value === null || (logarithmic && value <= 0)) continue;
    low = Math.min(low, value); high = Math.max(high, value);
  }
  [left, right] = zoom || whole();
  if (low > high) return null;
  if (low === high) { low -= Math.abs(low) * 0.1 || 1; high += Math.abs(high) * 0.1 || 1; }
  if (left === right) { left -= 1; right += 1; }
  if (!logarithmic) { const room = (high - low) * 0.05; low = low >= 0 ? Math.max(0, low - room) : low - room; high += room; }
  return {low, high, left, right};
}

function figure(chart) {
  const box = html('figure');
  box.dataset.chart = chart.name;
  const caption = html('figcaption'), saves = html('span', 'saves');
  caption.append(html('span', '', title(chart)), saves);
  box.append(caption);
  const lines = drawn(chart), logarithmic = log && chart.name.endsWith('loss'), range = bounds(lines, logarithmic);
  const width = Math.max(220, chart.wide ? root.clientWidth : box_width()), height = chart.wide ? 340 : 206;
  if (chart.wide) box.style.gridColumn = '1 / -1';
  const svg = make('svg', {viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': title(chart)});
  box.append(svg);
  if (!range) { svg.append(make('text', {x: LEFT, y: height / 2, class: 'mark'}, words.nothing)); return box; }
  const scale = (value) => (logarithmic ? Math.log10(value) : value);
  const x = (step) => LEFT + ((step - range.left) / (range.right - range.left)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((scale(value) - scale(range.low)) / (scale(range.high) - scale(range.low))) * (height - TOP - BOTTOM);
  const marks = logarithmic
    ? ticks(scale(range.low), scale(range.high), 4).map((power) => 10 ** power)
    : ticks(range.low, range.high, 4);
  for (const mark of marks) {
    svg.append(make('path', {d: `M${LEFT} ${y(mark).toFixed(1)}H${width - RIGHT}`, class: 'grid'}));
    svg.append(make('text', {x: LEFT - 6, y: y(mark) + 4, class: 'mark', 'text-anchor': 'end'}, spell(mark)));
  }
  for (const mark of ticks(range.left, range.right, width > 420 ? 6 : 4)) {
    if (mark !== Math.round(mark)) continue;
    const text = spellAxis(mark), last = x(mark) > width - 4 * text.length;  // it would be cut in the middle
    svg.append(make('text', {x: last ? width : x(mark), y: height - 22, class: 'mark', 'text-anchor': last ? 'end' : 'middle'}, text));
  }
  svg.append(make('text', {x: (LEFT + width - RIGHT) / 2, y: height - 5, class: 'mark axis', 'text-anchor': 'middle'}, words.axes[axis]));
  for (const [kind, act] of [['PNG', () => savePng(chart, svg, lines)], ['CSV', () => saveCsv(chart)]]) {
    const button = html('button', '', kind);
    button.type = 'button'; button.dataset.save = kind; button.title = `${words.save} ${kind}`; button.setAttribute('aria-label', `${title(chart)}: ${words.save} ${kind}`);
    button.addEventListener('click', act);
    saves.append(button);
  }
  const clip = `ht-clip-${chart.name}`, hole = make('clipPath', {id: clip});
  hole.append(make('rect', {x: LEFT - 3, y: 0, width: width - LEFT - RIGHT + 6, height: height - BOTTOM + 1}));
  svg.append(hole);
  for (const line of lines) {
    let path = '', pen = false;
    for (const [step, value] of line.points) {  // `step` is the place on the axis
      if (value === null || (logarithmic && value <= 0)) {
        pen = false;
        if (value === null) svg.append(make('circle', {cx: x(step), cy: TOP + 4, r: 4, class: 'odd', 'clip-path': `url(#${clip})`}));
        continue;
      }
      path += `${pen ? 'L' : 'M'}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = true;
    }
    if (line.points.length <= 40) for (const [step, value] of line.points) {
      if (value !== null && (!logarithmic || value > 0)) {
        svg.append(make('circle', {cx: x(step), cy: y(value), r: 2.5, style: `fill:${colour(line.run)}`, 'clip-path': `url(#${clip})`}));
      }
    }
    svg.append(make('path', {d: path, class: line.kind, style: `stroke:${colour(line.run)}`, 'clip-path': `url(#${clip})`, 'data-points': line.points.length}));
  }
  listen(box, svg, chart, lines, range, width, height);
  return box;
}

function listen(box, svg, chart, lines, range, width, height) {
  const band = make('rect', {y: TOP, height: height - TOP - BOTTOM, width: 0, class: 'band'});
  const rule = make('path', {class: 'rule'});
  const tip = html('div', 'tip');
  tip.hidden = true;
  svg.append(band, rule);
  box.append(tip);
  const place = (event) => {
    const frame = svg.getBoundingClientRect(), at = Math.min(width - RIGHT, Math.max(LEFT, (event.clientX - frame.left) * (width / frame.width)));
    return {at, step: range.left + ((at - LEFT) / (width - LEFT - RIGHT)) * (range.right - range.left)};
  };
  let from = null;
  svg.addEventListener('pointerdown', (event) => { from = place(event); svg.setPointerCapture(event.pointerId); });
  svg.addEventListener('pointermove', (event) => {
    const here = place(event);
    if (from) { band.setAttribute('x', Math.min(from.at, here.at)); band.setAttribute('width', Math.abs(from.at - here.at)); }
    rule.setAttribute('d', `M${here.at} ${TOP}V${height - BOTTOM}`);
    const rows = [];
    let nearest = null;
    for (const line of lines.filter((one) => one.kind === 'main')) {
      const point = line.points.reduce((best, one) => (best === null || Math.abs(one[0] - here.step) < Math.abs(best[0] - here.step) ? one : best), null);
      if (!point) continue;
      if (nearest === null) nearest = point;
      rows.push(`${data.runs.length > 1 ? line.run + ': ' : ''}${point[1] === null ? words.odd : spell(point[1])}`);
    }
    const step = Math.round(nearest ? nearest[2] : here.step).toLocaleString('en');
    tip.textContent = `${words.step} ${step}${axis === 'step' || !nearest ? '' : ` · ${spellAxis(nearest[0])}${axis === 'tokens' ? ` ${words.axes.tokens}` : ''}`}\n${rows.join('\n')}`;
    tip.hidden = false;
    tip.style.left = here.at > width / 2 ? 'auto' : `${here.at + 10}px`;
    tip.style.right = here.at > width / 2 ? `${width - here.at + 10}px` : 'auto';
  });
  svg.addEventListener('pointerleave', () => { tip.hidden = true; rule.setAttribute('d', ''); });
  svg.addEventListener('pointerup', (event) => {
    const here = place(event), began = from;
    from = null;
    band.setAttribute('width', 0);
    if (began && Math.abs(began.at - here.at) > 8) { zoom = [Math.min(began.step, here.step), Math.max(began.step, here.step)]; draw(); }
  });
  svg.addEventListener('dblclick', () => { zoom = null; draw(); });
}

function save(name, blob) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveCsv(chart) {
  const quoted = (text) => `"${String(text).replace(/"/g, '""')}"`, rows = [['run', 'step', 'tokens', 'seconds', chart.name].join(',')];
  const before = axis;
  for (const line of chart.lines) for (const [step, value] of line.points) {
    const places = ['tokens', 'time'].map((one) => { axis = one; return (data.scales[line.run] || []).length ? +placed(line.run, step).toPrecision(9) : ''; });
    rows.push([quoted(line.run), step, ...places, value === null ? 'nan' : value].join(','));
  }
  axis = before;
  save(`${chart.name}.csv`, new Blob([`${rows.join('\n')}\n`], {type: 'text/csv'}));
}

// As it is on the screen, twice as fine: what the style sheet says is written into a copy, which then stands alone.
function savePng(chart, svg, lines) {
  const copy = svg.cloneNode(true), names = ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'opacity', 'font-size', 'font-family', 'stroke-linejoin'];
  const from = [...svg.querySelectorAll('*')], to = [...copy.querySelectorAll('*')];
  from.forEach((node, index) => { const style = getComputedStyle(node); for (const name of names) to[index].style.setProperty(name, style.getPropertyValue(name)); });
  const width = +svg.getAttribute('width'), drawn = +svg.getAttribute('height'), runs = [...new Set(lines.map((line) => line.run))];
  const height = drawn + 24 + 18 * runs.length;
  copy.setAttribute('xmlns', NS);
  const image = new Image();
  image.addEventListener('load', () => {
    const canvas = document.createElement('canvas'), style = getComputedStyle(root), pen = canvas.getContext('2d');
    canvas.width = 2 * width; canvas.height = 2 * height;
    pen.scale(2, 2);
    pen.fillStyle = getComputedStyle(document.body).backgroundColor;
    pen.fillRect(0, 0, width, height);
    pen.fillStyle = style.color;
    pen.font = `600 13px ${style.fontFamily}`;
    pen.fillText(title(chart), 4, 16);
    pen.drawImage(image, 0, 24, width, drawn);
    pen.font = `13px ${style.fontFamily}`;
    runs.forEach((run, index) => {
      const y = drawn + 36 + 18 * index, key = root.querySelectorAll('.bar .key')[data.runs.indexOf(run)];
      pen.fillStyle = key ? getComputedStyle(key, '::before').borderTopColor : style.color;
      pen.fillRect(LEFT, y - 5, 18, 3);
      pen.fillStyle = style.color;
      pen.fillText(run, LEFT + 26, y);
    });
    canvas.toBlob((blob) => save(`${chart.name}.png`, blob));
  });
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
}

const columns = () => (root.clientWidth > 1050 ? 3 : root.clientWidth > 620 ? 2 : 1);
const box_width = () => Math.floor((root.clientWidth - (columns() - 1) * 18) / columns());

function controls() {
  const bar = html('div', 'bar');
  for (const run of data.runs) {
    const key = html('span', 'key', run);
    key.style.setProperty('--line', colour(run));
    bar.append(key);
  }
  bar.append(html('span', 'space'));
  const over = html('label', '', `${words.over} `), choice = html('select');
  choice.name = 'axis';
  for (const name of Object.keys(AXES)) { const option = html('option', '', words.axes[name]); option.value = name; choice.append(option); }
  choice.value = axis;
  choice.addEventListener('change', () => { axis = choice.value; zoom = null; draw(); root.querySelector('[name=axis]').focus(); });
  over.append(choice);
  bar.append(over);
  const toggle = (name, on, set) => {
    const label = html('label'), input = html('input');
    input.type = 'checkbox'; input.checked = on; input.name = name;
    input.addEventListener('change', () => { set(input.checked); draw(); });
    label.append(input, words[name]);
    bar.append(label);
  };
  toggle('raw', raw, (on) => { raw = on; });
  toggle('smooth', smooth, (on) => { smooth = on; });
  toggle('log', log, (on) => { log = on; });
  const all = html('button', '', words.all);
  all.type = 'button'; all.disabled = !zoom;
  all.addEventListener('click', () => { zoom = null; draw(); });
  bar.append(all);
  return bar;
}

function draw() {
  if (!root.clientWidth) return;  // in a tab that is not shown: drawn when it is
  root.replaceChildren();
  if (!data.charts.length) return;
  root.append(controls());
  const grid = html('div', 'grid');
  grid.style.gridTemplateColumns = `repeat(${columns()}, 1fr)`;
  for (const chart of data.charts) grid.append(figure(chart));
  root.append(grid, html('p', 'help', words.hint));
}

const update = () => {
  data = props.value ? JSON.parse(props.value) : {charts: [], runs: [], scales: {}};
  if (!root.querySelector('svg:active, select:focus')) draw();
};
watch('value', update);
let seen = 0;
new ResizeObserver(() => { if (root.clientWidth !== seen) { seen = root.clientWidth; draw(); } }).observe(root);
update();
