"""Drawings in SVG's terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """An SVG element: its attributes in order, a title to point at, text, elements within it."""

    tag: str
    attributes: tuple[tuple[str, str], ...] = ()
    title: str | None = None
    text: str = ""
    parts: tuple[Drawing, ...] = ()


def shape(
    tag: str,
    *parts: Drawing,
    text: str = "",
    title: str | None = None,
    **attributes: str | float,
) -> Drawing:
    """An element; `css` is its class, and "_" in the name of an attribute means "-"."""
    named = (
        ("class" if name == "css" else name.replace("_", "-"), str(value))
        for name, value in attributes.items()
    )
    return Drawing(tag=tag, attributes=tuple(named), title=title, text=text, parts=parts)
