(text) => new Promise((done) => {
  const input = document.createElement('input');
  input.type = 'file';
  input.accept = '.yaml,.yml';
  input.addEventListener('cancel', () => done(text));
  input.addEventListener('change', () => input.files[0].text().then(done));
  input.click();
})
