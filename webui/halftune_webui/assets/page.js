// Runs once for the page: its language, the keyboard, and the address, which keeps what is open over a reload.
// Names after # : tab, open (a run, several times), chat (a run), data (a report that the server still holds), evaluation.
() => {
  document.documentElement.lang = LANGUAGE;
  const selected = () => document.querySelector('#tabs [role=tab][aria-selected=true]');
  const keep = (name, values) => {
    const state = new URLSearchParams(location.hash.slice(1));
    state.delete(name);
    for (const value of values) state.append(name, value);
    if (`#${state}` !== location.hash) history.replaceState(null, '', `#${state}`);
  };

  // Tab leaves the editor, as it leaves every other field; indenting is done by spaces.
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Tab' && event.target.closest?.('.cm-editor')) event.stopImmediatePropagation();
  }, true);
  // A list that Tab has left is closed: Gradio's stays over what is below. Chromium's :focus-within would stay true there.
  document.addEventListener('focusin', (event) => {
    for (const list of document.querySelectorAll('.options')) list.hidden = !list.parentNode.contains(event.target);
  });
  document.addEventListener('click', (event) => {
    const link = event.target.closest?.('[data-goto]');
    if (link) document.querySelector(link.dataset.goto)?.scrollIntoView({behavior: 'smooth', block: 'start'});
  });

  document.addEventListener('click', async (event) => {
    const button = event.target.closest?.('[data-copy]');
    if (!button) return;
    try { await navigator.clipboard.writeText(button.dataset.copy); } catch (error) {  // a page without https may not
      window.getSelection().selectAllChildren(button.previousElementSibling);
      return;
    }
    button.classList.add('done');
    setTimeout(() => button.classList.remove('done'), 1500);
  });
  window.addEventListener('hashchange', () => location.reload());  // by a link, or by hand

  let before = '', asked = new URLSearchParams(location.hash.slice(1)).get('tab');
  const settle = () => {
    const tab = selected();
    if (!tab) return;
    if (asked) {
      const wanted = document.getElementById(`tab-${asked}-button`);
      asked = '';
      if (wanted && wanted !== tab) { wanted.click(); return; }
    }
    const name = tab.id.replace(/^tab-|-button$/g, '');
    if (before && name !== before) {
      keep('tab', [name]);
      setTimeout(() => {  // a button that opened this tab lies in the other one, and has lost the focus with it
        if (document.activeElement === document.body || !document.activeElement.checkVisibility()) selected()?.focus();
      }, 60);
    }
    before = name;
    for (const editor of document.querySelectorAll('.cm-content')) editor.tabIndex = 0;
  };
  const areas = {'#run-cards': ['open', '[data-card]', 'card'], '#chat': ['chat', '[data-chat]', 'chat'], '#data-report': ['data', '[data-report]', 'report'], '#evaluation': ['evaluation', '[data-evaluation]', 'evaluation']};
  const drawn = {};
  const look = () => {
    settle();
    for (const report of document.querySelectorAll('[data-of]')) {
      const now = window.halftuneRecipe;
      report.classList.toggle('old', now !== undefined && now.trim() !== report.dataset.of.trim());
    }
    for (const [area, [name, what, key]] of Object.entries(areas)) {
      const found = [...document.querySelectorAll(`${area} ${what}`)].map((one) => one.dataset[key]);
      if (!found.length && !drawn[area]) continue;  // not drawn yet: what the address says still holds
      drawn[area] = true;
      keep(name, found);
    }
  };
  let due = false;
  const soon = () => {
    if (due) return;
    due = true;
    setTimeout(() => { due = false; look(); }, 150);
  };
  new MutationObserver(soon).observe(document.body, {childList: true, subtree: true, attributes: true, attributeFilter: ['aria-selected']});
  soon();
}
