// Shows HTML that the server has escaped, and keeps what the reader did to it: scrolling, folded parts, focus.
// `element`, `trigger`, `props` and `watch` are Gradio's. A button with data-act tells the server; data-ask asks first.
const box = element.querySelector('.ht-live');
let brought = '';
let pressed = false;
const kept = (key) => [...box.querySelectorAll(`[data-keep]`)].map((one) => [one.dataset.keep, key(one)]);

const draw = () => {
  const html = props.value || '';
  if (box.dataset.seen === html) return;
  if (pressed) return;  // a button replaced between press and release gets no click
  if (document.activeElement && box.contains(document.activeElement.closest('form[data-act]'))) return;  // it is being filled in
  const scrolls = new Map(kept((one) => [one.scrollTop, one.scrollTop + one.clientHeight >= one.scrollHeight - 4]));
  // what the reader folded or unfolded stays so; the rest follows the server: the log of a run unfolds when it dies
  const open = new Map(kept((one) => (String(one.open) === one.dataset.drawn ? undefined : one.open)));
  const focus = document.activeElement && box.contains(document.activeElement) ? document.activeElement.id : '';
  box.innerHTML = html;
  box.dataset.seen = html;
  for (const one of box.querySelectorAll('[data-keep]')) {
    const before = scrolls.get(one.dataset.keep);
    if (one.tagName === 'DETAILS') { one.dataset.drawn = one.open; if (open.get(one.dataset.keep) !== undefined) one.open = open.get(one.dataset.keep); }
    else one.scrollTop = before && (!before[1] || one.dataset.from === 'top') ? before[0] : (one.dataset.from === 'top' ? 0 : one.scrollHeight);
  }
  const shown = box.querySelector('[data-show]');  // what the reader has asked for, and may lie below the window
  if (shown && shown.dataset.show !== brought) shown.scrollIntoView({behavior: 'smooth', block: 'start'});
  brought = shown ? shown.dataset.show : '';
  if (focus) { const again = document.getElementById(focus); if (again) again.focus(); }
};

element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-act]');
  if (!button || button.tagName !== 'BUTTON') return;
  if (button.dataset.ask && !window.confirm(button.dataset.ask)) return;
  trigger('submit', {act: button.dataset.act, run: button.dataset.run || '', on: false, text: ''});
});
element.addEventListener('change', (event) => {
  if (event.target.dataset.act) trigger('submit', {act: event.target.dataset.act, run: event.target.dataset.run, on: event.target.checked, text: ''});
});
element.addEventListener('submit', (event) => {  // a form of ours; Gradio's own event of that name has no target in here
  const form = event.target.closest ? event.target.closest('form[data-act]') : null;
  if (!form) return;
  event.preventDefault();
  trigger('submit', {act: form.dataset.act, run: form.dataset.run, on: false, text: JSON.stringify(Object.fromEntries(new FormData(form)))});
  document.activeElement.blur();
});
element.addEventListener('pointerdown', () => { pressed = true; });
for (const end of ['pointerup', 'pointercancel']) window.addEventListener(end, () => { if (pressed) setTimeout(() => { pressed = false; draw(); }, 0); });
box.addEventListener('focusout', () => setTimeout(draw, 0));
watch('value', draw);
draw();
