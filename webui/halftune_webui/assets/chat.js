// A conversation with a run's result, and with its base beside it. Runs once, when the component appears; `element`, `trigger`,
// `props` and `watch` are Gradio's. What is said stays in this browser tab, by run; the server answers one question at a time.
// Everything that a model or a person wrote is set as text, never as HTML.
const words = WORDS, SIDES = ['trained', 'base'], STORE = 'halftune-chat';  // tabs/chat.py puts in the words
const root = element.querySelector('.ht-chat');
const read = () => { try { return JSON.parse(sessionStorage.getItem(STORE)) || {}; } catch (error) { return {}; } };
const LARGE = 1 << 20, SIDE = 1536;  // larger files are sent as JPEG of at most this many pixels a side
const RATE = 16000, LONGEST = 60;  // sounds are sent as WAV of this rate, of at most this many seconds
const FILM = 8 << 20;  // videos are sent as they are, of at most so many bytes
let attached = [];  // images, videos and sounds of the next message, as parts of its content
let chosen = {run: '', name: ''}, model = {state: 'none'}, said = empty(), asked = 0, answering = null, slow = 0;

function empty() { return {trained: [], base: []}; }
function make(tag, options, ...children) {
  const node = Object.assign(document.createElement(tag), options);
  node.append(...children);
  return node;
}
const button = (id, text, act, cls = '') => make('button', {type: 'button', id, textContent: text, className: cls, onclick: act});

const load = button('chat-load', words.load, () => begin('load', {})), free = button('chat-free', words.free, () => trigger('click', {act: 'free'}));
const status = make('div', {className: 'status'});
status.setAttribute('role', 'status');
const picks = make('div', {className: 'picks'}), talks = make('div', {className: 'talks'}), talk = {};
for (const side of SIDES) {
  const title = make('h3', {}), box = make('div', {className: 'said', tabIndex: 0}), pick = button(`pick-${side}`, '', () => show(side));
  box.setAttribute('role', 'log');
  talk[side] = {title, box, pick, outer: make('section', {className: 'talk', id: side}, title, box)};
  picks.append(pick);
  talks.append(talk[side].outer);
}
const text = make('textarea', {id: 'chat-message', rows: 2}), hint = make('span', {className: 'help', id: 'chat-hint', textContent: words.enter});
text.setAttribute('aria-describedby', 'chat-hint');
const file = make('input', {type: 'file', id: 'chat-file', multiple: true, hidden: true, onchange: () => attach(file.files)});
const adding = button('chat-attach', words.attach, () => file.click()), media = make('div', {className: 'media'});
const send = button('chat-send', words.send, ask, 'primary'), stop = button('chat-stop', words.stop, () => trigger('click', {act: 'stop'}));
const again = button('chat-again', words.again, retry), anew = button('chat-new', words.anew, forget);
const both = make('input', {type: 'checkbox', id: 'chat-both', checked: true, onchange: draw});
root.append(
  make('div', {className: 'acts'}, load, free), status, picks, talks,
  make('div', {className: 'asking', id: 'chat-text'},
    make('div', {className: 'head'}, make('label', {htmlFor: 'chat-message', textContent: words.ask}), hint), media, text,
    make('div', {className: 'acts'}, send, stop, adding, file, again, anew, make('label', {className: 'both'}, both, words.both))),
);

text.addEventListener('input', buttons);
text.addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!send.disabled) ask();
});

root.addEventListener('dragover', (event) => { if (!adding.disabled && event.dataTransfer.types.includes('Files')) event.preventDefault(); });
root.addEventListener('drop', (event) => {
  if (adding.disabled || !event.dataTransfer.files.length) return;
  event.preventDefault();
  attach(event.dataTransfer.files);
});

const sides = () => (both.checked ? SIDES : SIDES.slice(0, 1));
const latest = (side) => said[side][said[side].length - 1];
const titled = (side) => (side === 'base' ? [words.base, model.run === chosen.run && model.base].filter(Boolean).join(' · ') : chosen.name || words.trained);

function show(side) { root.dataset.side = side; draw(); }

function begin(what, more) {
  answering = {number: asked += 1, what};
  trigger('submit', {act: what, number: asked, run: chosen.run, conversations: {}, ...more});
  model = {...model, error: ''};
  draw();
}
function question(words) {
  const conversations = {};
  for (const side of sides()) {
    said[side].push({role: 'user', content: words});
    conversations[side] = said[side].filter((one) => !one.failed).map(({role, content}) => ({role, content}));
  }
  begin('ask', {conversations});
  for (const side of sides()) talk[side].box.scrollTop = talk[side].box.scrollHeight;
}
function ask() {
  const words = text.value, parts = attached;
  if (!words.trim() || answering) return;
  text.value = '';
  attached = [];
  question(parts.length ? [...parts, {type: 'text', text: words}] : words);
}
async function attach(files) {
  model = {...model, error: ''};
  for (const one of [...files]) {
    try { attached.push(await part(one)); } catch (error) { model = {...model, error: words[{long: 'long', large: 'large'}[error.message] || 'bad_file']}; }
  }
  file.value = '';
  draw();
}
async function part(one) {
  if (model.videos && (one.type.startsWith('video/') || (one.type === 'image/gif' && !model.images))) {
    if (one.size > FILM) throw new Error('large');
    return {type: 'video_url', video_url: {url: await asUrl(one)}, name: one.name};
  }
  if (model.audio && !one.type.startsWith('image/')) return {type: 'input_audio', input_audio: {data: (await sound(one)).split(',')[1], format: 'wav'}};
  if (!model.images) throw new Error('kind');
  return {type: 'image_url', image_url: {url: await picture(one)}};
}
const asUrl = (blob) => new Promise((done, failed) => {
  const reader = new FileReader();
  Object.assign(reader, {onload: () => done(reader.result), onerror: failed}).readAsDataURL(blob);
});
async function picture(one) {
  const bitmap = await createImageBitmap(one);
  if (one.size <= LARGE) return asUrl(one);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = make('canvas', {width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale)});
  const pen = canvas.getContext('2d');
  pen.fillStyle = 'white';  // JPEG has no transparency
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL('image/jpeg', 0.92);
}
// Whatever the browser plays, as 16-bit WAV of one channel.
async function sound(one) {
  const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await one.arrayBuffer());
  if (decoded.duration > LONGEST) throw new Error('long');
  const count = decoded.numberOfChannels, channels = Array.from({length: count}, (_, at) => decoded.getChannelData(at));
  const view = new DataView(new ArrayBuffer(44 + 2 * decoded.length));
  [...'RIFF    WAVEfmt '].forEach((letter, at) => view.setUint8(at, letter.charCodeAt(0)));
  [...'data'].forEach((letter, at) => view.setUint8(36 + at, letter.charCodeAt(0)));
  for (const [at, bytes, value] of [[4, 4, 36 + 2 * decoded.length], [16, 4, 16], [20, 2, 1], [22, 2, 1], [24, 4, RATE], [28, 4, 2 * RATE], [32, 2, 2], [34, 2, 16], [40, 4, 2 * decoded.length]]) {
    view[`setUint${8 * bytes}`](at, value, true);
  }
  for (let at = 0; at < decoded.length; at += 1) {
    const mean = channels.reduce((sum, channel) => sum + channel[at], 0) / count;
    view.setInt16(44 + 2 * at, Math.max(-32768, Math.min(32767, Math.round(32768 * mean))), true);
  }
  return asUrl(new Blob([view], {type: 'audio/wav'}));
}
function drop(place) { attached.splice(place, 1); draw(); adding.focus(); }
function shown(one) {
  if (one.image_url) return make('img', {src: one.image_url.url, alt: words.picture});
  if (one.video_url?.url.startsWith('data:image/')) return make('img', {src: one.video_url.url, alt: words.film});
  if (one.video_url) {
    const film = make('video', {src: one.video_url.url, controls: true, muted: true});
    film.setAttribute('aria-label', words.film);
    film.addEventListener('error', () => film.replaceWith(make('span', {className: 'help', textContent: words.unplayed.replace('{name}', one.name || words.film)})));
    return film;
  }
  const player = make('audio', {src: `data:audio/wav;base64,${one.input_audio.data}`, controls: true});
  player.setAttribute('aria-label', words.sound);
  return player;
}
// The last question once more, without its answers.
function retry() {
  const last = said.trained.findLast((one) => one.role === 'user');
  for (const side of sides()) {
    const from = said[side].findLastIndex((one) => one.role === 'user');
    if (from >= 0 && JSON.stringify(said[side][from].content) === JSON.stringify(last.content)) said[side].splice(from);
  }
  question(last.content);
}
function forget() { said = empty(); keep(); draw(); text.focus(); }

function keep() {
  try { sessionStorage.setItem(STORE, JSON.stringify({...read(), [chosen.run]: said})); } catch (error) { /* no room: nothing is kept */ }
}

async function copy(content, from) {
  try { await navigator.clipboard.writeText(content); } catch (error) {  // not over plain http
    const area = make('textarea', {value: content});
    root.append(area); area.select(); document.execCommand('copy'); area.remove();
  }
  from.textContent = words.copied;
  setTimeout(() => { from.textContent = words.copy; }, 1500);
}

function message(one) {
  if (one.role === 'user') {
    const parts = Array.isArray(one.content) ? one.content : [{text: one.content}];
    return [make('p', {className: 'user'}, ...parts.map((one) => ('text' in one ? one.text : shown(one))))];
  }
  const answer = one.content.trim() ? make('p', {className: 'assistant', textContent: one.content}) : make('p', {className: 'help', textContent: one.done ? words.silent : '…'});
  const foot = make('div', {className: 'foot'});
  if (one.done && one.content.trim()) foot.append(button('', words.copy, (event) => copy(one.content, event.target)));
  if (one.seconds && one.tokens) foot.append(make('span', {className: 'help', textContent: words.speed.replace('{n}', Number((one.tokens / one.seconds).toPrecision(2)).toLocaleString('en')).replace('{tokens}', one.tokens)}));
  return [answer, foot];
}

function buttons() {
  const ready = model.state === 'ready' && model.run === chosen.run;
  load.disabled = !chosen.run || Boolean(answering) || ready;
  free.disabled = !['ready', 'loading'].includes(model.state);
  adding.hidden = !(ready && (model.images || model.videos || model.audio));
  adding.disabled = adding.hidden || Boolean(answering);
  file.accept = [model.images && 'image/*', model.videos && 'video/*,image/gif', model.audio && 'audio/*'].filter(Boolean).join();
  send.disabled = !chosen.run || Boolean(answering) || !text.value.trim();
  stop.disabled = answering?.what !== 'ask' || model.state === 'loading';
  again.disabled = !chosen.run || Boolean(answering) || !said.trained.length;
  anew.disabled = Boolean(answering) || !said.trained.length;
}

function draw() {
  const fits = model.run === chosen.run, state = fits ? model.state : 'none';
  const line = {none: chosen.run ? words.unloaded : words.choose, freed: words.freed, loading: words.loading, ready: model.said, failed: model.error}[state];
  const stated = make('p', {className: {ready: 'ok', failed: 'cause'}[state] || 'help', textContent: line});
  if (state === 'ready') { stated.id = 'chat-ready'; }
  status.replaceChildren(stated);
  if (state === 'loading') status.append(make('div', {className: 'progress unknown'}, make('i')));
  if (fits && state !== 'failed' && model.error) status.append(make('p', {className: 'cause', textContent: model.error}));
  media.replaceChildren(...attached.map((one, place) => {
    const remove = button('', '✕', () => drop(place));
    remove.setAttribute('aria-label', words.remove);
    return make('div', {}, shown(one), remove);
  }));
  if (chosen.run) root.dataset.chat = chosen.run; else delete root.dataset.chat;
  root.dataset.side ||= 'trained';
  root.classList.toggle('alone', !both.checked);
  for (const side of SIDES) {
    const {title, box, pick, outer} = talk[side], end = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
    title.textContent = pick.textContent = titled(side);
    pick.setAttribute('aria-pressed', root.dataset.side === side);
    outer.classList.toggle('blank', !said[side].length);
    box.setAttribute('aria-label', titled(side));
    box.replaceChildren(...said[side].flatMap(message));
    if (end) box.scrollTop = box.scrollHeight;
  }
  buttons();
}

// What the server says: the model's state, and what the question that is being answered has brought so far.
watch('value', () => {
  const told = JSON.parse(props.value || '{}');
  if (!told.state) return;
  model = told;
  if (answering && told.number === answering.number) {
    for (const [side, answer] of Object.entries(told.answers || {})) {
      if (latest(side)?.role === 'user') said[side].push({role: 'assistant', content: ''});
      if (latest(side)) Object.assign(latest(side), {content: answer.text, ...answer});
    }
    if (told.over) { answering = null; if (told.number) keep(); }
  }
  draw();
});
// Which run is chosen above: its conversation comes back.
const choose = () => {
  const next = JSON.parse(props.chosen || '{}');
  if (next.run === chosen.run) return;
  if (chosen.run) keep();
  chosen = {run: next.run || '', name: next.name || ''};
  said = {...empty(), ...read()[chosen.run]};
  attached = [];
  answering = null;
  draw();
};
watch('chosen', choose);
choose();
draw();
