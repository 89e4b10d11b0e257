"""HTML elements as text: whatever is not an element already is escaped."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is HTML already. Only this file and literal markup make one."""

    __slots__ = ()


Content = object  # Html, text, a number, None (nothing), or a list or tuple of these


def render(content: Content) -> Html:
    """Content as HTML; text is escaped, None is nothing."""
    if content is None:
        return Html("")
    if isinstance(content, Html):
        return content
    if isinstance(content, list | tuple):
        return Html("".join(map(render, content)))
    return Html(escape(str(content)))


def element(name: str, *content: Content, **attributes: str | float | None) -> Html:
    """``<name attributes>content</name>``. ``class_`` is ``class``, other underscores are dashes; None is left out."""
    text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{text}>{render(content)}</{name}>")


def section(anchor: str, title: str, *content: Content) -> Html:
    """A section of the page, or nothing where all its content is nothing."""
    body = render(content)
    return element("section", element("h2", title), body, id=anchor) if body else body


def table(
    head: tuple[str, ...], rows: list[tuple[Content, ...]], *, numeric: tuple[int, ...] = (), kind: str | None = None
) -> Html:
    """A table; ``numeric`` columns are set flush right; ``kind`` is its class in the style sheet."""
    if not rows:
        return Html("")

    def cells(name: str, row: tuple[Content, ...]) -> Html:
        return element(
            "tr",
            [element(name, cell, class_="n" if i in numeric else None) for i, cell in enumerate(row)],
        )

    # an empty head row is not drawn
    top = element("thead", cells("th", head)) if any(head) else None
    body = element("tbody", [cells("td", row) for row in rows])
    return element("div", element("table", top, body, class_=kind), class_="scroll")
