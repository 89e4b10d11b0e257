() => {
  // page.js opens the tab that the address keeps by its button; on a narrow screen the button may not be there
  const name = new URLSearchParams(location.hash.slice(1)).get('tab') || '';
  return [document.getElementById(`tab-${name}-button`) ? '' : name];
}
