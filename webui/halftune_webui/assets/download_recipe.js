(text) => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], {type: 'application/yaml'}));
  link.download = 'recipe.yaml';
  link.click();
  URL.revokeObjectURL(link.href);
}
