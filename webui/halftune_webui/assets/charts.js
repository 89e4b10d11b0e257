// The curves of the runs, drawn by the script that a run's report has, too. tabs/runs.py puts in that script and the words:
// `element`, `watch` and the value are Gradio's.
((given) => {
  const props = {words: WORDS, get value() { return given.value; }};
/* charts */
})(props);
