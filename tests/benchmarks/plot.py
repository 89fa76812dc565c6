"""Tables as bars, in one SVG that a browser and a README show."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from measuring import Table

WIDTH, BAR, LABEL = 900, 18, 260


def draw(path: Path, tables: Sequence[Table], *, column: str = "median s") -> None:
    """Draw a column of figures of each table, to the scale of the table's largest."""
    parts, y = [], 10
    for table in tables:
        parts.append(_text(10, y + 14, table.title, 'font-weight="bold"'))
        y += 24
        most = max(float(str(row[column])) for row in table.rows) or 1.0
        for row in table.rows:
            figure, name = float(str(row[column])), str(row["rival"])
            wide = max(1, round(figure / most * (WIDTH - LABEL - 90)))
            colour = "#2a7f62" if name.startswith("hfdcp") else "#b0b0b0" if name.startswith("floor") else "#c06a3a"
            parts.append(_text(10, y + 13, name))
            parts.append(f'<rect x="{LABEL}" y="{y}" width="{wide}" height="{BAR - 4}" fill="{colour}"/>')
            parts.append(_text(LABEL + wide + 6, y + 13, f"{figure:g}"))
            y += BAR
        y += 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">'
    )
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"]))


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
