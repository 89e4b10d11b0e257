(text, machine) => {
  try { return [localStorage.getItem('halftune-recipe') || text, machine]; } catch (error) { return [text, machine]; }
}
