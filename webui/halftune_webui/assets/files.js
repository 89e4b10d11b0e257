// Data files: chosen from the web UI's folders, or uploaded by button or by dragging. Stands before form.js and shares its
// scope; `words` and `make` are there. The answers of the server are set as text, never as HTML.
function filePicker(use) {
  const said = words.files, box = make('div', 'ht-files'), panel = make('div', 'browser'), note = make('p', 'help', said.drag);
  const button = (text, act) => {
    const node = make('button', '', text);
    node.type = 'button';
    node.addEventListener('click', act);
    return node;
  };
  const input = make('input');
  input.type = 'file'; input.hidden = true; input.setAttribute('aria-label', said.upload);
  panel.hidden = true;
  note.setAttribute('role', 'status');
  const choose = button(said.choose, () => { panel.hidden = !panel.hidden; choose.setAttribute('aria-expanded', String(!panel.hidden)); if (!panel.hidden) show(''); });
  choose.setAttribute('aria-expanded', 'false');
  const taken = (path, leftOut) => { panel.hidden = true; choose.setAttribute('aria-expanded', 'false'); note.textContent = said.taken.replace('{name}', path) + (leftOut ? ` ${said.left_out.replace('{n}', leftOut)}` : ''); use(path); };

  async function show(folder) {
    const answer = await fetch(`halftune/files?folder=${encodeURIComponent(folder)}`).then((one) => one.json());
    panel.replaceChildren();
    if (answer.error) { panel.append(make('p', 'problem', answer.error)); return; }
    const head = make('p', 'place');
    head.append(make('code', '', answer.folder));
    const list = make('ul');
    const line = (text, act, size) => { const item = make('li'); item.append(button(text, act)); if (size !== undefined) item.append(make('span', 'help', size)); list.append(item); };
    if (answer.up !== null) line(`↑ ${said.up}`, () => show(answer.up));
    for (const root of answer.roots.length > 1 ? answer.roots : []) if (root !== answer.folder) line(`▣ ${root}`, () => show(root));
    for (const one of answer.folders) line(`▸ ${one.name}`, () => show(one.path));
    for (const one of answer.files) line(one.name, () => taken(one.path), bytes(one.bytes));
    if (!answer.files.length) list.append(make('li', 'help', said.none));
    if (answer.more) list.append(make('li', 'help', said.more));
    if (answer.folder !== '.') head.append(' ', button(said.whole, () => taken(answer.folder)));
    panel.append(head, list);
  }

  function upload(file) {
    if (!file) return;
    const request = new XMLHttpRequest();  // fetch tells nothing of an upload's progress
    request.open('PUT', `halftune/upload/${encodeURIComponent(file.name)}`);
    request.upload.addEventListener('progress', (event) => { note.textContent = `${file.name}: ${Math.floor((100 * event.loaded) / event.total)} %`; });
    request.addEventListener('loadend', () => {
      let answer = {};
      try { answer = JSON.parse(request.responseText); } catch (error) { answer = {error: request.responseText || said.failed}; }
      if (answer.path) taken(answer.path, answer.left_out); else note.textContent = answer.error || said.failed;
      note.classList.toggle('problem', !answer.path);
    });
    request.send(file);
  }

  const bytes = (count) => { let unit = 0; for (; count >= 1024 && unit < 4; unit += 1) count /= 1024; return `${count >= 10 || !unit ? Math.round(count) : count.toFixed(1)} ${['B', 'KiB', 'MiB', 'GiB', 'TiB'][unit]}`; };
  input.addEventListener('change', () => { upload(input.files[0]); input.value = ''; });
  for (const name of ['dragover', 'dragleave', 'drop']) element.addEventListener(name, (event) => {
    if (!event.dataTransfer || ![...event.dataTransfer.types].includes('Files')) return;
    event.preventDefault();
    box.classList.toggle('over', name === 'dragover');
    if (name !== 'drop') return;
    if (event.dataTransfer.files.length === 1) upload(event.dataTransfer.files[0]); else note.textContent = said.one;
  });
  const bar = make('div', 'bar');
  bar.append(choose, button(said.upload, () => input.click()), input, note);
  box.append(bar, panel);
  return box;
}
