(name, text, machine) => {
  const kept = name && name !== OWN && text.trim() && !SHIPPED.includes(text.trim()) && !window.confirm(QUESTION);
  return [kept ? OWN : name, text, machine];
}
