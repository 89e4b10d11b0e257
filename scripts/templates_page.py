"""Prints docs/reference/chat-templates.md from the table of chat templates.

python scripts/templates_page.py > docs/reference/chat-templates.md
"""

from __future__ import annotations

from halftune.config.chat_templates import TemplateRow, templates

HEAD = """# Chat templates

`model.chat_template` takes one of these names, or the path of a Jinja file. Without it, the tokenizer's own template
renders conversations. A tokenizer without one gets the format whose tokens its vocabulary has; without any, data with
conversations is refused. See [Choose a template, add tokens](../how-to/templates-and-tokens.md).

- *Tokens*: the tokenizer must have them. Otherwise the run stops before training and names them.
- *End*: the token that ends an answer. It becomes the tokenizer's EOS.
- *System*: `turn` has a turn or place of its own, `in the question` is written into the first question, `refused` drops
  rows with a system message, unless `data.merge_system` moves it. `default` is written where a conversation has none.
- *Tools*: a row with tools stops the run with `data.tools_unsupported` where the format defines none.
- The file of a published tokenizer may add a dated or longer default system text. These templates do not.

| name | also | tokens | end | system | tools | documented by |
|---|---|---|---|---|---|---|
"""


def _code(*texts: str) -> str:
    return " ".join(f"`{text}`".replace("|", "\\|") for text in texts) or "-"


def _system(row: TemplateRow) -> str:
    place = "refused" if not row.system else "in the question" if row.merged else "turn"
    return f"{place}, default" if row.default_system is not None else place


def line(row: TemplateRow) -> str:
    """The row of the table."""
    end = "EOS" if row.end == "{eos}" else _code(row.end)
    address = row.source if "://" in row.source else f"https://huggingface.co/{row.source}"
    cells = (
        _code(row.name), _code(*row.aliases), _code(*row.tokens), end, _system(row), "yes" if row.tools else "-",
        f"[{row.source.removeprefix('https://')}]({address})",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(HEAD + "\n".join(map(line, templates())))
