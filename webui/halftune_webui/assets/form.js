// Draws the form from the schema and keeps it in step with the recipe's text. Runs once, when the component appears;
// `element`, `trigger`, `props` and `watch` are Gradio's. Everything that comes from a recipe is set as text, never as HTML.
const groups = GROUPS, words = WORDS;  // tabs/train.py puts in what stands in capitals
let hints = HINTS;
const root = element.querySelector('.ht-form');
const rows = new Map();      // dotted path → {row, node, control, problem, why}
const lists = new Map();     // dotted path of a list of sections → {row, body, count}
const typing = new Set();    // paths of fields that somebody is writing into: an answer to an earlier change leaves them
const changed = new Set();   // paths whose change has not been answered yet
let state = null, waiting = [], sent = 0, busy = false, watchdog = 0;

function make(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  return node;
}

// A field's documentation: what stands between backticks is code.
function prose(tag, text) {
  const node = make(tag, 'help');
  text.split('`').forEach((part, index) => node.append(index % 2 ? make('code', '', part) : part));
  return node;
}

// Each change names its `field`: Gradio takes an object with a `path` for an uploaded file. One change at a time: each is answered with the recipe's new text, from which the next one starts.
function send(edit) {
  changed.add(edit.field);
  waiting.push(edit);
  flush();
}
function flush() {
  if (busy || !waiting.length) return;
  busy = true; sent += 1;
  root.classList.add('busy');
  watchdog = setTimeout(() => { busy = false; flush(); }, 20000);
  trigger('submit', {edits: waiting.splice(0), seq: sent});
}

function title(row, path) {
  const key = path.replace(/\[\d+\]/g, '');
  const last = row.path.split('.').pop().replace(/_/g, ' ');
  return words.fields[key] || last.charAt(0).toUpperCase() + last.slice(1);
}

function control(row, path, id) {
  const set = (value) => send({op: 'set', field: path, value});
  let node;
  if (row.kind === 'choice') {
    node = make('select');
    for (const word of row.words) {
      const option = make('option', '', word);
      option.value = word;
      node.append(option);
    }
    node.addEventListener('change', () => set(node.value));
  } else if (row.kind === 'flag') {
    node = make('input'); node.type = 'checkbox'; node.setAttribute('role', 'switch');
    node.addEventListener('change', () => set(node.checked));
  } else if (row.kind === 'several') {
    node = make('div', 'several'); node.setAttribute('role', 'group');
    for (const word of row.words) {
      const label = make('label'), box = make('input');
      box.type = 'checkbox'; box.value = word;
      box.addEventListener('change', () => set([...node.querySelectorAll('input:checked')].map((one) => one.value)));
      label.append(box, make('span', '', word));
      node.append(label);
    }
  } else {
    const long = row.kind === 'lines' || row.kind === 'pairs';
    node = make(long ? 'textarea' : 'input');
    if (long) node.rows = 1; else node.type = 'text';
    node.spellcheck = false; node.autocomplete = 'off';
    node.placeholder = row.default || (row.required ? words.required : words.empty);
    const known = [...row.words, ...(hints[path.replace(/\[\d+\]/g, '')] || [])];
    if (known.length && !long) {
      const list = make('datalist'); list.id = `${id}-list`;
      suggest(list, known);
      node.setAttribute('list', list.id);
      node.addEventListener('focus', async () => {  // files come and go
        try { hints = await fetch('halftune/hints').then((one) => one.json()); } catch (error) { return; }
        suggest(list, [...row.words, ...(hints[path.replace(/\[\d+\]/g, '')] || [])]);
      });
      root.append(list);
    }
    node.addEventListener('input', () => typing.add(path));
    node.addEventListener('change', () => set(node.value));
    node.addEventListener('blur', () => typing.delete(path));
    if (!long) node.addEventListener('keydown', (event) => { if (event.key === 'Enter') node.blur(); });
  }
  node.id = id;
  return node;
}

function suggest(list, known) {
  list.replaceChildren(...known.map((word) => { const option = make('option'); option.value = word; return option; }));
}

function fill(entry, text, isSet) {
  const {row, path, control: node} = entry, value = isSet ? text : row.default;
  entry.node.classList.toggle('set', isSet);
  entry.reset.hidden = !isSet || row.required;
  if (typing.has(path) || changed.has(path)) return;
  if (row.kind === 'choice') {
    if (![...node.options].some((option) => option.value === value)) {  // what the recipe says and we do not know
      const option = make('option', '', value); option.value = value; node.append(option);
    }
    node.value = value;
  } else if (row.kind === 'flag') {
    node.checked = value === 'true';
  } else if (row.kind === 'several') {
    const chosen = value.split('\n');
    for (const box of node.querySelectorAll('input')) box.checked = chosen.includes(box.value);
  } else {
    node.value = isSet ? text : '';
    if (node.tagName === 'TEXTAREA') node.rows = Math.min(8, Math.max(1, node.value.split('\n').length));
  }
}

function draw(row, path, into) {
  if (row.kind === 'entries') return drawList(row, path, into);
  const id = `ht-${path.replace(/[^a-z0-9_]+/gi, '-')}`, node = make('div', `row ${row.kind}`);
  node.dataset.path = path;
  const head = make('div', 'head'), label = make('label', '', title(row, path));
  label.htmlFor = id;
  label.title = path;
  const reset = make('button', 'reset', '↺');
  reset.type = 'button'; reset.title = words.reset; reset.setAttribute('aria-label', `${words.reset}: ${path}`);
  reset.addEventListener('click', () => send({op: 'set', field: path, value: ''}));
  head.append(label);
  const input = control(row, path, id), help = prose('p', words.help[path.replace(/\[\d+\]/g, '')] || row.help);
  help.id = `${id}-help`;
  help.title = row.expects;
  input.setAttribute('aria-describedby', `${id}-help ${id}-problem`);
  const problem = make('p', 'problem'); problem.id = `${id}-problem`; problem.setAttribute('role', 'alert');
  const why = make('details', 'why'); why.hidden = true;
  const outcome = make('p', 'outcome'); outcome.hidden = true;
  node.append(head, input, reset, outcome, problem, why, help);
  into.append(node);
  rows.set(path, {row, path, node, control: input, problem, why, outcome, reset});
}

function drawList(row, path, into) {
  const node = make('div', 'row entries'); node.dataset.path = path;
  const head = make('div', 'head');
  const name = make('span', 'label', title(row, path));
  name.title = path;
  head.append(name);
  const problem = make('p', 'problem'), body = make('div', 'cards'), add = make('button', 'add', `+ ${words.add}`);
  problem.setAttribute('role', 'alert');
  add.type = 'button';
  add.addEventListener('click', () => send({op: 'add', field: path}));
  node.append(head);
  if (path === 'data.train') {  // the first source
    node.append(filePicker((file) => {
      if (!lists.get(path).count) send({op: 'add', field: path});
      send({op: 'set', field: `${path}[0].path`, value: file});
    }));
  }
  node.append(body, add, problem, prose('p', words.help[path] || row.help));
  into.append(node);
  lists.set(path, {row, node, body, problem, count: 0});
}

function resize(path, count) {
  const list = lists.get(path);
  if (list.count === count) return;
  for (const known of [...rows.keys()]) if (known.startsWith(`${path}[`)) rows.delete(known);
  list.body.replaceChildren();
  list.count = count;
  for (let index = 0; index < count; index += 1) {
    const card = make('div', 'card'), one = `${path}[${index}]`;
    const [first, ...rest] = list.row.rows;
    draw(first, `${one}.${first.path}`, card);
    const fold = make('details'), grid = make('div', 'grid');
    fold.append(make('summary', '', words.more), grid);
    for (const inner of rest) draw(inner, `${one}.${inner.path}`, grid);
    const remove = make('button', 'remove', words.remove);
    remove.type = 'button';
    remove.addEventListener('click', () => send({op: 'remove', field: one}));
    card.append(fold, remove);
    list.body.append(card);
  }
}

function build() {
  for (const group of groups) {
    const outer = make(group.name === 'common' ? 'section' : 'details', 'group');
    outer.dataset.group = group.name;
    const head = make(group.name === 'common' ? 'h3' : 'summary');
    head.append(make('span', 'name', words.groups[group.name] || group.name), make('span', 'count'));
    if (group.help) head.append(prose('span', words.help[group.name] || group.help));
    const grid = make('div', 'grid');
    outer.append(head, grid);
    root.append(outer);
    for (const row of group.rows) draw(row, row.path, grid);
  }
}

function value(path) {
  const text = state.fields[path];
  return text !== undefined ? text : (rows.has(path) ? rows.get(path).row.default : '');
}

function bring({node, row}) {
  node.hidden = Boolean(row.when && !row.when.slice(1).includes(value(row.when[0])));
}

function mark(path, entry) {
  const impossible = state.impossible[path] || {}, names = Object.keys(impossible);
  for (const option of entry.control.options || []) {
    const why = impossible[option.value];
    option.textContent = why ? `${option.value} ✗ ${words.impossible}` : option.value;
    option.title = why || '';
  }
  entry.why.hidden = !names.length;
  entry.why.replaceChildren(make('summary', '', `${words.impossible_list.replace('{machine}', state.machine || words.here)} ${names.join(', ')}`));
  for (const name of names) {
    const line = make('p');
    line.append(make('b', '', name), make('span', '', ` ${impossible[name]}`));
    entry.why.append(line);
  }
}

// What the plan made of a choice, right below it.
function tell(path, entry) {
  const said = state.outcome[path];
  entry.outcome.hidden = !said;
  entry.outcome.replaceChildren('→ ', make('b', '', said ? said[0] : ''), said ? ` ${said[1]}` : '');
}

function complain(node, texts) {
  node.textContent = (texts || []).join('\n');
  node.closest('.row').classList.toggle('wrong', Boolean(texts && texts.length));
}

function apply(next) {
  state = next;
  if (state.seq === sent) { busy = false; clearTimeout(watchdog); }
  if (!busy && !waiting.length) changed.clear();
  root.classList.toggle('busy', busy);
  root.toggleAttribute('inert', !state.readable);
  root.classList.toggle('unreadable', !state.readable);
  if (state.keep) { try { localStorage.setItem('halftune-recipe', state.text); } catch (error) { /* no storage: nothing is kept */ } }
  setTimeout(flush, 0);  // when the new text has reached the editor, too: the next change is made to it
  if (!state.readable) return;
  for (const path of lists.keys()) resize(path, state.entries[path] || 0);
  for (const [path, entry] of rows) {
    fill(entry, state.fields[path], state.fields[path] !== undefined);
    complain(entry.problem, state.problems[path]);
    bring(entry);
    if (entry.row.kind === 'choice') mark(path, entry);
    tell(path, entry);
  }
  for (const [path, list] of lists) { complain(list.problem, state.problems[path]); bring(list); }
  for (const outer of root.querySelectorAll('.group')) {
    const wrong = outer.querySelectorAll('.row.wrong').length, set = outer.querySelectorAll('.row.set').length;
    const shown = outer.querySelectorAll('.grid > .row:not([hidden])').length;
    outer.hidden = !shown;
    const count = outer.querySelector('.count');
    count.textContent = wrong ? words.wrong.replace('{n}', wrong) : (set && outer.tagName === 'DETAILS' ? words.set.replace('{n}', set) : '');
    count.classList.toggle('wrong', wrong > 0);
    if (wrong && outer.tagName === 'DETAILS') outer.open = true;
  }
}

build();
const update = () => { if (props.value) apply(JSON.parse(props.value)); };
watch('value', update);
update();
